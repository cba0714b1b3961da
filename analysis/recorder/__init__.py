"""Implement ``analysis record``, which records a machine in one or several calls."""
