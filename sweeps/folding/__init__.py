"""Fold the events of a run into table rows, counts and a verdict on its health.

Nothing in this package imports torch or starts a process.
"""
