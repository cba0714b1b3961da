"""Tools to time one batch of launches: clocks, operands, cache states, sensors and statistics."""
