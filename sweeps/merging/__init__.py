"""Merge recordings that were made without shards, on several nodes or days, into one."""
