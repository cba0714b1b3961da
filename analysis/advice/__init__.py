"""Which shape to use instead of which."""
