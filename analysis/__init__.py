"""Fit a model to measured times, and derive advice, verdicts on rules, and plots.

PyTorch is needed only to audit a model and to measure. Reading a recording and predicting need
neither a GPU nor Triton.
"""
