"""The page: what was measured, predicted and advised, as one file that answers in a browser."""
