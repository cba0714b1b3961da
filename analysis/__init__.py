"""Fit a model to measured times, and use it for advice, plots, and verdicts on rules of thumb.

PyTorch is needed to measure times and to audit neural networks. Recordings can be read, and times
predicted, without a GPU and without Triton.
"""
