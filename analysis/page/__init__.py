"""HTML page of what was measured, predicted and advised; one file that answers in a browser."""
