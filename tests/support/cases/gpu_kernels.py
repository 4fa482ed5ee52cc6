"""A Triton kernel that a GPU runs. Triton reads its source from this file."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton ships no types.

import triton
import triton.language as tl


@triton.jit
def softened(x, out, n, BLOCK: tl.constexpr):  # noqa: N803 - Triton's convention
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, value * tl.sigmoid(value), mask=at < n)
