"""Hand-written Triton kernels: one file per family, on what all of them share."""
