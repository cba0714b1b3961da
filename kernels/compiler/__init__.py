"""Inspection of the code that the compiler makes of the Triton kernels, without a GPU."""
