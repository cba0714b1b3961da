"""Estimate of a problem's time on a machine, from one formula, datasheet values and constants."""
