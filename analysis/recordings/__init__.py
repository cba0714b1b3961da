"""Recordings: our own measurements and imported ones, and how both are read and written."""
