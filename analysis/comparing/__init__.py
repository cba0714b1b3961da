"""Compare the results of two versions, or hand-written kernels with the vendor library."""
