"""Measure how good the model is on held-out rows, and what its advice is worth."""
