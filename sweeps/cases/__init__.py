"""What is timed: sweeps read from their TOML files, and the cases that they expand to."""
