"""Merge recordings of one machine, from several nodes or several days, into one recording."""
