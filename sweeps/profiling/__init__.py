"""Training steps of two models, profiled operation by operation."""
