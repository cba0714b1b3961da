"""Explain traces: how long each operation should take, and which change saves most."""
