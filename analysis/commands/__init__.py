"""The commands of ``python -m analysis``, one file per group of verbs."""
