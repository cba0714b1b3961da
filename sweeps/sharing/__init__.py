"""One run on several GPUs of a node: a worker for each, and a parent that follows them."""
