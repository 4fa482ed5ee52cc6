"""What Inductor generates C++ code for: vector instructions and threads."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa

from graphstash.hooks.environment import read_part

__all__ = ["GPUS", "accelerator_type", "cpu_target"]

GPUS: Final = frozenset({"cuda", "xpu"})
"""Types of devices for which Inductor generates Triton kernels."""


def cpu_target() -> Mapping[str, str]:
    """Return what C++ code depends on and torch's keys omit.

    Both may change during the process. torch reads them when it generates code.
    """
    return {"threads": read_part(torch.get_num_threads), "vec_isa": read_part(_vec_isa)}


@cache
def accelerator_type() -> str:
    """Return the accelerator of this process, e.g. `cuda`, or an empty string."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def _vec_isa() -> str:
    """Return the vector instructions for which Inductor generates CPU code.

    To pick them, Inductor builds and loads probes. A process with an accelerator may never need
    them. For it, return the inputs of `pick_vec_isa` (2.7 and 2.15) other than the compiler and the
    CPU features, which are parts already.
    """
    if accelerator_type():
        setting = os.environ.get("ATEN_CPU_CAPABILITY", "")
        return f"by {setting} {config.cpp.simdlen} {config.cpp.vec_isa_ok}"
    isa = pick_vec_isa()
    return f"{isa} {isa.bit_width()} {isa.build_arch_flags()}"
