"""What is timed, and how: sweeps declared as data, a sampler, and the runner that brings both
together with the kernels. Importing this needs neither PyTorch nor Triton.
"""
