"""Merge separate recordings of one machine, made on several nodes or days, into one."""
