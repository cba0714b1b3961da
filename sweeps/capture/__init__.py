"""Capture the operations of a whole model with fake tensors, which need no memory and no GPU."""
