"""One run on several GPUs of a node: a worker for each GPU, and a parent that follows them."""
