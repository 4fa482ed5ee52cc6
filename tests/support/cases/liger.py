"""Kernels of Liger, compiled for an absent GPU."""

# mypy: disable-error-code="import-not-found"

import hashlib
from typing import Any

import triton
from liger_kernel.ops import (  # only in `frameworks`
    geglu,
    layer_norm,
    rms_norm,
    rope,
    swiglu,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from support.cases.triton_kernels import assembled

FLOATS = ("eps", "offset", "gate_multiplier")
WIDE = {"n_cols": 1024, "BLOCK_SIZE": 1024}
NORM = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 1024}
HEADS = {"bs": 4, "cos_bs": 1, "n_qh": 8, "n_kh": 2, "hd": 64, "rd": 64, "BLOCK_SIZE": 64}
PADDED = {"pad_n_qh": 8, "pad_n_kh": 2, "pad_hd": 64, "pad_rd": 64, "BACKWARD_PASS": False}
KERNELS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (rms_norm._rms_norm_forward_kernel, NORM),
    (swiglu._swiglu_forward_kernel, WIDE),
    (swiglu._swiglu_backward_kernel, WIDE),
    (layer_norm._layer_norm_forward_kernel, {"BLOCK_SIZE": 1024}),
    (geglu._geglu_tanh_forward_kernel, WIDE),
    (rope._triton_rope, HEADS | PADDED),
)


def kernels() -> dict[str, Any]:
    """Compile every kernel. The digests of the cubins are the `losses`, which all hosts share."""
    return {"losses": [_compiled(*each) for each in KERNELS], "ptxas": assembled()}


def _compiled(kernel: Any, constants: dict[str, Any]) -> str:
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else _type_of(name) for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    return hashlib.sha256(cubin).hexdigest()


def _type_of(name: str) -> str:
    if name in FLOATS:
        return "fp32"
    is_number = "stride" in name or name.startswith("n_") or name == "sl"
    return "i32" if is_number else "*fp32"
