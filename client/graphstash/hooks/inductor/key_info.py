"""What is inside the keys that torch makes: the graph, its inputs, and the settings in force.

torch lists all that it hashes beside every key, for its own logs: `compiled_fx_graph_hash`
and `autograd_cache_key` (2.7 and 2.15; in 2.15 the latter only where it is logged).
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

from torch._inductor import config

__all__ = ["KeyInfo"]

_LINE: Final = re.compile(r"\[(\w+)\] (\w+)(?:\[([^\]]*)\])?: (.*)", re.DOTALL)
_TENSOR: Final = re.compile(r"dtype=torch\.(\w+), shape=torch\.Size\(\[([^\]]*)\]\)")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_READ: Final = frozenset(
    {
        *("ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDA_ARCH_LIST"),
        *(
            f"TORCHINDUCTOR_{name}"
            for name in (
                *("COORDINATE_DESCENT_TUNING", "CPP_WRAPPER", "CUDAGRAPHS", "EPILOGUE_FUSION"),
                *("FREEZING", "LAYOUT_OPTIMIZATION", "MAX_AUTOTUNE", "MAX_AUTOTUNE_CONV_BACKENDS"),
                *("MAX_AUTOTUNE_GEMM", "MAX_AUTOTUNE_GEMM_BACKENDS", "MAX_AUTOTUNE_POINTWISE"),
                *("MAX_FUSION_SIZE", "MULTI_KERNEL", "PERMUTE_FUSION", "SHAPE_PADDING"),
                *("SIMDLEN", "SPLIT_REDUCTIONS", "USE_FAST_MATH", "GROUP_FUSION"),
            )
        ),
    }
)
"""Variables that choose code and hold no secret. Others, such as the address of a Redis with its
password, stay on this host."""
_MAX_VALUE: Final = 200
_MAX_KEYS: Final = 64


class KeyInfo:
    """Remembers the lists of the last keys; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the lists
        self._lists: OrderedDict[str, list[str]] = OrderedDict()

    def listen(self, make_key: Callable[..., tuple[str, list[str]]]) -> Callable[..., Any]:
        """Wraps a function of torch that makes keys."""

        @wraps(make_key)
        def listened(*args: Any, **kwargs: Any) -> tuple[str, list[str]]:
            made = make_key(*args, **kwargs)
            with self._lock:
                self._lists[made[0]] = made[1]
                while len(self._lists) > _MAX_KEYS:
                    self._lists.popitem(last=False)
            return made

        return listened

    def details(self, name: str) -> dict[str, str]:
        """What is inside of torch's name of an entry; empty when torch has not listed it."""
        with self._lock:
            lines = next((each for key, each in self._lists.items() if key in name), [])
        inputs, settings, details = [], [], {}
        for line in lines:
            found = _LINE.fullmatch(line)
            if found is None:
                continue
            digest, what, index, value = found.groups()
            if what == "gm":
                details["program"] = digest
            elif what == "example_inputs":
                inputs.append(_input(value))
            elif what != "inductor_config" or not _is_default(index):
                label = what if index is None else f"{what}.{index}"
                settings.append(f"{label}={_ADDRESS.sub('', value)[:_MAX_VALUE]}")
        if lines:
            details |= {"inputs": ", ".join(inputs), "settings": "\n".join(sorted(settings))}
        return details | _variables(os.environ)


def _input(value: str) -> str:
    """Type and shape of a tensor, e.g. `float32[8, 4]`; other inputs as torch shows them."""
    found = _TENSOR.search(value)
    return f"{found[1]}[{found[2]}]" if found else value[:_MAX_VALUE]


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch reads its defaults from: what they change counts as no setting."""
    return {f"env.{name}": value for name, value in environ.items() if name in _READ}


def _is_default(name: str) -> bool:
    try:
        return bool(config._is_default(name))  # type: ignore[attr-defined] # made by torch
    except Exception:  # noqa: BLE001 - a private name: then all settings are listed
        return False
