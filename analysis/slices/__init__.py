"""Slices of a recording that plots, findings and the page show: series, and cliffs along M."""
