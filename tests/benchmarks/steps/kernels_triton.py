"""Three kernels of a training step, which Triton compiles for sm_90 without a GPU.

kernels_triton.py REPORT
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
options = parser.parse_args()

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = tl.load(a + rows[:, None] * k + start + inner[None, :])
        right = tl.load(b + (start + inner[:, None]) * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.jit
def softmax(x, y, n, BN: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BN)
    scores = tl.load(x + row * n + columns, mask=columns < n, other=float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    tl.store(y + row * n + columns, weights / tl.sum(weights, 0), mask=columns < n)


@triton.jit
def layer_norm(x, y, scale, shift, n, BN: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BN)
    mask = columns < n
    values = tl.load(x + row * n + columns, mask=mask, other=0.0)
    centred = tl.where(mask, values - tl.sum(values, 0) / n, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / n + 1e-5)
    result = normed * tl.load(scale + columns, mask=mask) + tl.load(shift + columns, mask=mask)
    tl.store(y + row * n + columns, result, mask=mask)


KERNELS = (
    (matmul, {"a": "*fp16", "b": "*fp16", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}, "MNK"),
    (softmax, {"x": "*fp32", "y": "*fp32", "n": "i32"}, "N"),
    (layer_norm, dict.fromkeys(("x", "y", "scale", "shift"), "*fp32") | {"n": "i32"}, "N"),
)
BLOCK = {"M": 64, "N": 64, "K": 32}

cubins, seconds = [], []
started = time.monotonic()
for kernel, signature, blocks in KERNELS:
    constants = {f"B{block}": BLOCK[block] for block in blocks}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    cubins.append(hashlib.sha256(compiled.asm["cubin"]).hexdigest())
seconds.append(time.monotonic() - started)

options.report.write_text(json.dumps({"losses": cubins, "step_seconds": seconds}))
