"""Inspection of what the compiler makes of the Triton kernels, for GPUs that are not here."""
