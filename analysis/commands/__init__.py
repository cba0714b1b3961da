"""The commands of this package, one file per group of verbs."""
