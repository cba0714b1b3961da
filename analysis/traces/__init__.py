"""Read profiler traces: operations, their shapes and kernels, and where the time went."""
