"""What events become: rows of a table, counts, a verdict on the run. No torch, no processes."""
