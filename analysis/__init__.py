"""Fit a model to measured times, and derive advice, rules and plots from both.

The package needs no GPU and no Triton. Only auditing a model needs PyTorch.
"""
