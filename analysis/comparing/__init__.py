"""Two recordings of one machine, and hand-written kernels against the vendor library."""
