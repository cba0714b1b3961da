"""Fit a model to measured times; derive advice, plots, and verdicts on rules of thumb from it.

PyTorch is needed only to audit a model and to measure. Recordings can be read, and times predicted,
without a GPU and without Triton.
"""
