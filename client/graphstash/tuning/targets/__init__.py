"""What can be tuned.

    callable      any Python function that builds a kernel
    tvm_gemm      matrix multiplication in TVM, on the CPU
    triton        kernels, by a decorator that takes the place of Triton's own
    helion        Helion's kernels: the team as its remote cache
    inductor      matrix products of torch.compile; inductor_candidates says what they are, and
                  inductor_table fills torch's own table

The first two import their compiler in the processes that measure, not before.
"""

__all__: list[str] = []
