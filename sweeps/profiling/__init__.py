"""Profile training steps of two models, operation by operation."""
