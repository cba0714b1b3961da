"""Test the field's rules as experiments, and compute a verdict for each."""
