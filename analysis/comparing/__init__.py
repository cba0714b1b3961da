"""Compare two recordings of one machine, or hand-written kernels with the vendor library."""
