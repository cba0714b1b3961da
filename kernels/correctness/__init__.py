"""Checks of results: the float64 reference, Freivalds' identity, and the verdict."""
