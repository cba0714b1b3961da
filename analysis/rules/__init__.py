"""Test common performance rules by experiments, and compute a verdict on each."""
