"""Versions of an accelerator's driver, and of the libraries that XLA uses to compile for it.

XLA chooses kernels of cuDNN and cuBLAS by running them, and uses a feature of CUDA graphs only if
the driver has it. The keys of JAX contain neither. A host may also load libraries that are not
installed as Python packages, so these functions read what this process has loaded.

XLA also runs an assembler and a linker, and links a device library. jaxlib 0.10.2 takes them from a
toolkit, such as CUDA's in `--xla_gpu_cuda_data_dir`, from `PATH`, or from `CUDA_HOME`.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

from graphstash.hooks.environment import read_part, sample_of
from graphstash.hooks.mappings import memory_mappings

__all__ = ["gpu_parts", "libtpu", "toolkit"]

_PACKAGES: Final = re.compile(r"(jax[-_](cuda|rocm)|nvidia[-_])[\w-]*", re.IGNORECASE)
"""Names of JAX's GPU plug-ins, and of NVIDIA's libraries."""

_DRIVERS: Final = {"libcuda": "cuDriverGetVersion", "libamdhip64": "hipDriverGetVersion"}
"""By library of a driver: the function that writes its version to an `int *`."""

_VERSIONS: Final = re.compile(r"(jax_\w+_plugin|jaxlib\.\w+)\._versions")
"""Modules of JAX with functions such as `cudnn_get_version`, which ask the loaded libraries."""

_TOOLS: Final = ("ptxas", "nvlink", "fatbinary")
_LIBRARIES: Final = ("nvvm/libdevice/*.bc", "amdgcn/bitcode/*.bc", "*.bc")
_TOOLKITS: Final = ("/usr/local/cuda", "/opt/cuda", "/opt/rocm")
"""Directories in which XLA looks for a device library if the given folders have none."""

_MAX_SCRIPT_BYTES: Final = 2**16
_VERSION_SECONDS: Final = 10.0


@cache
def gpu_parts() -> dict[str, str]:
    """Return the parts of a key for GPUs. Call it when a client for GPUs exists."""
    return {
        "driver": _describe_driver(),
        "libraries": " ".join(sorted({*_package_versions(), *_library_versions()})),
    }


def libtpu() -> str:
    """Return a sample of the libtpu that this process has loaded, or `none`."""
    path = next((each for each in _loaded_files() if each.name == "libtpu.so"), None)
    return "none" if path is None else _sample(path)


def toolkit(folders: Iterable[str]) -> str:
    """Describe the tools and device libraries that XLA uses with these folders of toolkits."""
    given = [Path(each) for each in (*folders, os.environ.get("CUDA_HOME", "")) if each]
    tools = [each / "bin" / tool for each in given for tool in _TOOLS]
    tools += [Path(found) for tool in _TOOLS if (found := shutil.which(tool))]
    libraries = [*_libraries_in(given)] or [*_libraries_in(map(Path, _TOOLKITS))]
    present = [each for each in (*tools, *libraries) if each.is_file()]
    return " ".join(f"{each.name}={read_part(partial(_describe_file, each))}" for each in present)


def _libraries_in(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for pattern in _LIBRARIES:
            yield from sorted(folder.glob(pattern))


def _describe_file(path: Path) -> str:
    status = path.stat()
    return _describe_contents(path, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=64)
def _describe_contents(path: Path, *_changed: int) -> str:
    """Return a sample of a file, and the version of the tool that a script starts."""
    sample = sample_of(path)
    if path.suffix or path.stat().st_size > _MAX_SCRIPT_BYTES:
        return sample
    command = [str(path), "--version"]
    result = subprocess.run(command, capture_output=True, timeout=_VERSION_SECONDS, check=False)
    return f"{sample} {sha256(result.stdout).hexdigest()}"


@cache
def _sample(path: Path) -> str:
    return read_part(lambda: sample_of(path))


def _describe_driver() -> str:
    found = (path for path in _loaded_files() if path.name.partition(".so")[0] in _DRIVERS)
    path = next(found, None)
    return "none" if path is None else f"{path.name.partition('.so')[0]} {_driver_version(path)}"


def _driver_version(path: Path) -> str:
    version = ctypes.c_int(-1)

    def ask() -> int:
        function = getattr(ctypes.CDLL(str(path)), _DRIVERS[path.name.partition(".so")[0]])
        function(ctypes.byref(version))
        return version.value

    return read_part(ask)


def _package_versions() -> Iterator[str]:
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"]).lower()
        if _PACKAGES.fullmatch(name):
            yield f"{name}={distribution.version}"


def _library_versions() -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        if _VERSIONS.fullmatch(name):
            for function, ask in vars(module).items():
                if function.endswith("_get_version"):
                    yield f"{function.removesuffix('_get_version')}:{read_part(ask)}"


def _loaded_files() -> Iterator[Path]:
    """Yield the files that this process has mapped."""
    return map(Path, dict.fromkeys(each.path for each in memory_mappings() if each.path))
