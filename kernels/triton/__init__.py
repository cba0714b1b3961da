"""Hand-written Triton kernels: one module per family, and the modules that the families share."""
