"""Explain traces: how long each operation should take, and which change saves the most time."""
