"""Compiles kernels of Liger for a GPU that this host does not have, as `triton_job.py` does.

The report has the digests of the cubins as `losses`: what two hosts must agree on.
"""

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

report = Path(sys.argv[1])
host = report.parent
runs = host / "ptxas-runs"


def wrap_ptxas():
    """Puts a script before ptxas which counts what it compiles."""
    package = Path(str(importlib.util.find_spec("triton").origin)).parent
    for name in ("ptxas", "ptxas-blackwell"):
        real = package / "backends" / "nvidia" / "bin" / name
        wrapper = host / name
        wrapper.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo run >> {runs};; esac\n'
            f'exec {real} "$@"\n'
        )
        wrapper.chmod(0o755)
        if real.exists():
            os.environ[f"TRITON_{name.upper().replace('-', '_')}_PATH"] = str(wrapper)


wrap_ptxas()
os.environ["TRITON_CACHE_DIR"] = str(host / "triton")

import triton
from liger_kernel.ops import geglu, layer_norm, rms_norm, rope, swiglu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOATS = ("eps", "offset", "gate_multiplier")
WIDE = {"n_cols": 1024, "BLOCK_SIZE": 1024}
NORM = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 1024}
HEADS = {"bs": 4, "cos_bs": 1, "n_qh": 8, "n_kh": 2, "hd": 64, "rd": 64, "BLOCK_SIZE": 64}
PADDED = {"pad_n_qh": 8, "pad_n_kh": 2, "pad_hd": 64, "pad_rd": 64, "BACKWARD_PASS": False}
KERNELS = (
    (rms_norm._rms_norm_forward_kernel, NORM),
    (swiglu._swiglu_forward_kernel, WIDE),
    (swiglu._swiglu_backward_kernel, WIDE),
    (layer_norm._layer_norm_forward_kernel, {"BLOCK_SIZE": 1024}),
    (geglu._geglu_tanh_forward_kernel, WIDE),
    (rope._triton_rope, HEADS | PADDED),
)


def type_of(name):
    if name in FLOATS:
        return "fp32"
    is_number = "stride" in name or name.startswith("n_") or name == "sl"
    return "i32" if is_number else "*fp32"


def compiled(kernel, constants):
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    return hashlib.sha256(cubin).hexdigest()


losses = [compiled(*each) for each in KERNELS]
ptxas = len(runs.read_text().splitlines()) if runs.exists() else 0
report.write_text(json.dumps({"losses": losses, "ptxas": ptxas}))
