"""Hand-written Triton kernels: one module per family, and modules that all of them share."""
