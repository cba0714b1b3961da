"""Steps of two models, profiled operation by operation."""
