"""Targets: the kernels that can be tuned.

    callable      any Python function that builds a kernel
    tvm_gemm      matrix multiplication in TVM, on the CPU
    triton        kernels, by a decorator that replaces Triton's own
    helion        Helion's kernels, with the team's memory as their remote cache
    inductor      matrix products of torch.compile; inductor_candidates identifies them, and
                  inductor_table fills torch's own table

The first two import their compiler only in the measuring processes.
"""

__all__: list[str] = []
