"""Sweeps declared as data, a sampler, and the runner that connects both with the kernels.

Importing this package needs neither PyTorch nor Triton.
"""
