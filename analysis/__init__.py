"""Model, advice, rules and plots computed from measurements. Needs no GPU, PyTorch or Triton."""
