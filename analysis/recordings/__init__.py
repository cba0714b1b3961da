"""Read and write recordings: our own measurements and imported tables."""
