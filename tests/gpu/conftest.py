"""Promise: on a GPU of NVIDIA, hooks share and training computes as on CPUs.

`make test-gpu` alone runs these tests. It fails where there is no GPU.
"""
