"""Measure how accurate the model is on held-out measurements, and what its advice is worth."""
