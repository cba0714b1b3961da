"""The child process of a run, which prepares, checks and times cases."""
