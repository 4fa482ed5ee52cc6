"""Promise: on an NVIDIA GPU, hooks share artifacts and training computes as on CPUs.

Only `make test-gpu` runs these tests. It fails on a machine without a GPU.
"""
