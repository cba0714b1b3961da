"""Fit a model to measured times, and derive advice, rules and plots from both.

PyTorch is needed only to audit a model and to measure; no GPU or Triton is needed to read a
recording or to predict.
"""
