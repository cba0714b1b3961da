"""Estimated time of a problem on a machine, from one formula with facts and constants."""
