"""Vendor libraries that PyTorch calls: cuBLAS and cuDNN on a GPU, a BLAS and oneDNN on a CPU."""
