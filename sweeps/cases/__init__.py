"""Sweeps as their TOML files declare them, and the cases that they expand to."""
