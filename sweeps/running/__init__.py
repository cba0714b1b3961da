"""A run: the plan, the child process that measures, the parent that survives it, the rows."""
