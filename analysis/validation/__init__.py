"""How good the model is on rows that it has not seen, and what its advice is worth."""
