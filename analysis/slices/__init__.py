"""Series of times and speeds from a recording, and cliffs, for plots, findings and the page."""
