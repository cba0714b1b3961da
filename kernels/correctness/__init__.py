"""Whether a result is right: the float64 reference, Freivalds' identity, and the verdict."""
