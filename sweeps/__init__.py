"""Sweeps of benchmark cases, the sampler that times the cases, and the runner of whole sweeps.

Importing this package needs neither PyTorch nor Triton.
"""
