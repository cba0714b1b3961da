"""The products of a whole model, seen by PyTorch's fake tensors: no memory, no GPU."""
