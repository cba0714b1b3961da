"""Inspection, without a GPU, of the code that the compiler generates for the Triton kernels."""
