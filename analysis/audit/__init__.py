"""Audit whole models: where the time of a step goes, and which dimensions to change."""
