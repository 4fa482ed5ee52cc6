"""The parts of an entry's fingerprint that torch's own key of a graph omits.

The key of the FX and AOTAutograd caches (2.7 to 2.15) holds the graph, the inputs' metadata,
Inductor's settings, a hash of torch's Python files, the GPU's name and the CUDA version. It omits
the target of the C++ code in an entry. With this key alone, an AVX-512 entry would be a hit on an
AVX2 host and silently compute wrong numbers. So this module adds the vector instruction set, the
CPU, the thread count (2.7), the C++ compiler, the C library, Python, the driver and the way in
which torch was built.

An entry for GPUs contains the Triton kernels of the graph. torch 2.8 and newer load these kernels
without Triton's own key. So this module also adds what Triton compiles with.
"""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
from torch.utils._triton import has_triton_package

from graphstash._compile.request import CompileRequest
from graphstash.hooks.environment import (
    cpu_device_type,
    cpu_features,
    cpu_model,
    libc,
    read_part,
)
from graphstash.hooks.inductor.key_info import GPU_SUFFIX
from graphstash.hooks.inductor.target import accelerator_type, cpu_target
from graphstash.hooks.labels import user_line
from graphstash_schema import ArtifactKind, DeviceType

_MAX_SCRIPT_BYTES: Final = 1024**2

_OF_USERS: Final = frozenset(
    {"HOME", "LOGNAME", "OLDPWD", "PATH", "PWD", "SHLVL", "TMPDIR", "USER", "_"}
)
"""Variables that a script may name and that differ between users. They are omitted."""

_PROPERTIES: Final = (
    *("name", "gcnArchName", "major", "minor", "multi_processor_count", "warp_size"),
    *("gpu_eu_count", "driver_version"),  # of Intel's GPUs
)
"""Properties of a device that Inductor or Triton may read."""

_OF_CPU: Final = frozenset({"compiler", "cpu_features", "cpu_model"})

__all__ = ["entry_parts", "entry_request", "host_parts", "request_of"]


def entry_request(
    kind: ArtifactKind,
    name: str,
    *,
    variant: int,
    details: Callable[[], Mapping[str, str]] = dict,
) -> CompileRequest:
    """Return the request for an entry under torch's `name`, e.g. `pt2:fx-graph-v1::f3a…:c1`.

    Entries under one name have different guards and `variant` numbers. `details` returns what the
    name consists of. Neither name nor value contains the device of a graph. A process with an
    accelerator therefore stores all graphs under the accelerator, including those for its CPU.
    """
    parts = entry_parts(name, variant=variant)
    request = request_of(kind, parts, _device_type(), details=details)
    # After a miss of an AOTAutograd entry, torch looks up the FX graphs in it. Only a miss of an FX
    # graph means a compilation. torch stores no autotuning results for a graph that has none.
    return replace(
        request,
        is_compiled=kind is ArtifactKind.INDUCTOR,
        is_optional=kind is ArtifactKind.AUTOTUNE,
    )


def entry_parts(name: str, *, variant: int) -> dict[str, str]:
    """Return all parts of the key of `name`.

    An entry for GPUs only does not depend on the CPU or the C++ compiler.
    """
    if GPU_SUFFIX in name:
        host = {part: value for part, value in host_parts().items() if part not in _OF_CPU}
        return {**host, **_accelerator_parts(), "name": name, "variant": str(variant)}
    return {
        **host_parts(),
        **_accelerator_parts(),
        "name": name,
        "variant": str(variant),
        **cpu_target(),
    }


def request_of(
    kind: ArtifactKind,
    parts: Mapping[str, str],
    device_type: DeviceType | None = None,
    *,
    label: str = "",
    details: Callable[[], Mapping[str, str]] = dict,
) -> CompileRequest:
    """Return a request. Default: for this host's CPU, labeled with the user's current line."""
    return CompileRequest.of(
        kind,
        device_type or cpu_device_type(),
        parts,
        toolchain=f"torch {torch.__version__}",
        label=label or user_line(),
        details=details,
    )


def host_parts() -> Mapping[str, str]:
    """Return the parts for all compilations on this host. Only the compiler may change."""
    return {**_fixed_parts(), "compiler": read_part(_describe_compiler)}


@cache
def _fixed_parts() -> Mapping[str, str]:
    return {
        "torch": torch.__version__,
        "torch_git": read_part(lambda: torch.version.git_version),
        "torch_build": read_part(_build_digest),
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}",
        "libc": libc(),
        "cpu_features": read_part(lambda: " ".join(cpu_features())),
        "cpu_model": read_part(cpu_model),
    }


def _build_digest() -> str:
    """Return a digest of how torch was built. Two builds of one release differ, for example, in the
    library for matrix products, and trace a function into other operations.
    """
    lines: list[str] = torch.__config__.show().splitlines()
    fixed = [line for line in lines if "CPU capability" not in line]  # of the host, in other parts
    return sha256("\n".join(fixed).encode()).hexdigest()


def _describe_compiler() -> str:
    """Return the version of the C++ compiler, and the digest of its binary or script.

    `g++` and `/usr/bin/g++` share artifacts. For a script, include the environment variables that
    it may read.
    """
    path = shutil.which(compiler := get_cpp_compiler())
    if path is None:
        return _compiler_version(compiler, "")
    status = Path(path).stat()
    # A package manager may keep the time of modification.
    state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    version = _compiler_version(compiler, path, *state)
    names = _words_of_script(path, *state)
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return " ".join([version, *variables])


@cache
def _compiler_version(compiler: str, path: str, *_state: int) -> str:
    digest = sha256(Path(path).read_bytes()).hexdigest() if path else ""
    version = get_compiler_version_info(compiler).replace(f"COLLECT_GCC={compiler}", "COLLECT_GCC")
    return f"{version} {digest}"


@cache
def _words_of_script(script: str, *_state: int) -> tuple[str, ...]:
    """Return the words of a script that can name variables. Empty for a binary."""
    with Path(script).open("rb") as file:
        if file.read(2) != b"#!":
            return ()
        words = re.findall(rb"[A-Za-z_]\w*", file.read(_MAX_SCRIPT_BYTES))
    return tuple(sorted({word.decode() for word in words} - _OF_USERS))


@cache
def _device_type() -> DeviceType:
    accelerator = accelerator_type()
    if not accelerator:
        return cpu_device_type()
    if accelerator == "cuda":
        backend, arch = _triton_target()
        return (
            DeviceType.of("rocm", arch) if backend == "hip" else DeviceType.of("cuda", f"sm_{arch}")
        )
    properties: Any = torch.get_device_module(accelerator).get_device_properties()
    return DeviceType.of(accelerator, str(properties.name))


def _accelerator_parts() -> Mapping[str, str]:
    if not accelerator_type():
        return {"device": "cpu"}
    return {**_fixed_accelerator_parts(), **_triton_parts()}


@cache
def _fixed_accelerator_parts() -> Mapping[str, str]:
    return {
        "device": read_part(_device_kinds),
        "cuda": read_part(lambda: torch.version.cuda),
        "hip": read_part(lambda: torch.version.hip),
        "driver": read_part(_driver_version),
    }


def _driver_version() -> Any:
    return torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined] # builds with CUDA


def _triton_parts() -> Mapping[str, str]:
    """Return what changes the Triton kernels in an entry.

    Raises:
        CacheError: no key covers everything that Triton compiles.
    """
    if not has_triton_package():
        return {}
    from graphstash.hooks.triton.fingerprint import compiler_parts, default_libraries

    parts = compiler_parts(os.environ, *_triton_target())
    parts["libraries"] = read_part(partial(default_libraries, *_triton_target()))
    return {name if name.startswith("env.") else f"triton_{name}": parts[name] for name in parts}


@cache
def _triton_target() -> tuple[str, Any]:
    """Return Triton's names of the backend and the architecture, which is "" for Intel's GPUs."""
    if accelerator_type() != "cuda":
        return accelerator_type(), ""
    if torch.version.hip is not None:
        properties: Any = torch.cuda.get_device_properties()
        return "hip", str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return "cuda", 10 * major + minor


def _device_kinds() -> str:
    """Return the kinds of the visible devices. Inductor generates code for the number of their
    processors, which a partition of a device or a service may reduce.
    """
    module: Any = torch.get_device_module(accelerator_type())
    found = map(module.get_device_properties, range(module.device_count()))
    return " + ".join(sorted({_describe_device(each) for each in found}))


def _describe_device(properties: Any) -> str:
    named = ((name, getattr(properties, name, None)) for name in _PROPERTIES)
    return " ".join(f"{name}={value}" for name, value in named if value is not None)
