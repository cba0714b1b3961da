"""Sweeps declared as data, the sampler that times their cases, and the runner of both.

Importing this package needs neither PyTorch nor Triton.
"""
