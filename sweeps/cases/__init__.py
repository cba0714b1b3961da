"""Read sweeps from their TOML files, and expand them into cases."""
