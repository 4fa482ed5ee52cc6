"""Versions of an accelerator's driver, and of the libraries that XLA uses to compile for it.

XLA chooses kernels of cuDNN and cuBLAS by running them, and uses a feature of CUDA graphs only if
the driver has it. The keys of JAX contain neither. A host may also load libraries that are not
installed as Python packages, so these functions read what this process has loaded.
"""

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from graphstash.hooks.environment import read_part, sample_of
from graphstash.hooks.mappings import memory_mappings

__all__ = ["gpu_parts", "libtpu"]

_PACKAGES: Final = re.compile(r"(jax[-_](cuda|rocm)|nvidia[-_])[\w-]*", re.IGNORECASE)
"""Names of JAX's GPU plug-ins, and of NVIDIA's libraries."""

_DRIVERS: Final = {"libcuda": "cuDriverGetVersion", "libamdhip64": "hipDriverGetVersion"}
"""By library of a driver: the function that writes its version to an `int *`."""

_VERSIONS: Final = re.compile(r"(jax_\w+_plugin|jaxlib\.\w+)\._versions")
"""Modules of JAX with functions such as `cudnn_get_version`, which ask the loaded libraries."""


@cache
def gpu_parts() -> dict[str, str]:
    """Return the parts of a key for GPUs. Call it when a client for GPUs exists."""
    return {"driver": _driver(), "libraries": " ".join(sorted({*_packages(), *_versions()}))}


def libtpu() -> str:
    """Return a sample of the libtpu that this process has loaded, or `none`."""
    path = next((each for each in _loaded() if each.name == "libtpu.so"), None)
    return "none" if path is None else _sample(path)


@cache
def _sample(path: Path) -> str:
    return read_part(lambda: sample_of(path))


def _driver() -> str:
    found = (path for path in _loaded() if path.name.partition(".so")[0] in _DRIVERS)
    path = next(found, None)
    return "none" if path is None else f"{path.name.partition('.so')[0]} {_version(path)}"


def _version(path: Path) -> str:
    version = ctypes.c_int(-1)

    def ask() -> int:
        function = getattr(ctypes.CDLL(str(path)), _DRIVERS[path.name.partition(".so")[0]])
        function(ctypes.byref(version))
        return version.value

    return read_part(ask)


def _packages() -> Iterator[str]:
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"]).lower()
        if _PACKAGES.fullmatch(name):
            yield f"{name}={distribution.version}"


def _versions() -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        if _VERSIONS.fullmatch(name):
            for function, ask in vars(module).items():
                if function.endswith("_get_version"):
                    yield f"{function.removesuffix('_get_version')}:{read_part(ask)}"


def _loaded() -> Iterator[Path]:
    """Yield the files that this process has mapped."""
    return map(Path, dict.fromkeys(each.path for each in memory_mappings() if each.path))
