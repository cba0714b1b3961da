"""Hand-written Triton kernels: five families, the modules that they share, and an SM clock."""
