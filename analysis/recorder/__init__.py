"""``analysis record``: record all that a machine can tell in slices, the most valuable first."""
