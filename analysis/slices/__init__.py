"""Extract series of times and speeds, and cliffs, from a recording for plots and reports."""
