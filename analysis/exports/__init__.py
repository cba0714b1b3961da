"""Convert recordings to the formats of other programs."""
