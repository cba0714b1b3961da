"""Which cases a run has, in which order, what they should take, and which belong together."""
