"""Fit a model to measured times; derive advice, plots, and verdicts on rules of thumb from it.

PyTorch is needed to measure and to audit models. Recordings can be read, and times predicted,
without a GPU and without Triton.
"""
