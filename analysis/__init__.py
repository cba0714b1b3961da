"""Model, advice, rules and plots computed from measurements.

The package needs no GPU, PyTorch or Triton.
"""
