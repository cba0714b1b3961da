"""``analysis record``: everything that a machine can tell, in the order of its worth, in slices."""
