"""Extract series of times or speeds from a recording, and find cliffs, for plots and reports."""
