"""Fit a model to measured times, and derive advice, rules and plots from both.

The package needs no GPU, PyTorch or Triton.
"""
