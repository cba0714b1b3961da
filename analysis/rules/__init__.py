"""Test common performance rules against measurements, and compute a verdict on each rule."""
