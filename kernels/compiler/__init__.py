"""Inspection of the code that the compiler generates for the Triton kernels, without a GPU."""
