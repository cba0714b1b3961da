"""Carry out one run on several GPUs of a node, with a worker for each GPU."""
