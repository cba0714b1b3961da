"""Explanation of a trace: what each operation should take, and which change saves most."""
