"""What the child process of a run does: it prepares, checks and times cases."""
