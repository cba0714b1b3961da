"""Vendor libraries that PyTorch calls: cuBLAS and cuDNN on a GPU, MKL and oneDNN on a CPU."""
