"""Helpers for all packages: errors, command names, lookup of machines, and checks of input."""
