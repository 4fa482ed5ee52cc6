"""The key of a Triton kernel's artifact: Triton's own key, and the settings that it omits.

Triton's key hashes the files of Triton's compilers and language, the kernel's source with its line
number, the target with its architecture, the options with the contents of device libraries, ptxas'
version and some environment variables. It omits others that change a kernel, on AMD most of them.
This key contains every variable of Triton and its compilers (`_READ`) that may change a kernel, the
values that a kernel reads (see `source`), what a program replaced inside Triton (see `replaced`),
and the files of Gluon and of `triton.runtime`.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, Reason
from graphstash.hooks.environment import read_part, sample_of
from graphstash.hooks.named_files import contents_of
from graphstash.hooks.triton.replaced import globals_of
from graphstash.hooks.triton.source import (
    compiled_for,
    options_being_compiled,
    replacements,
    settings_of,
    target_being_compiled,
    values_in,
)
from graphstash_schema import ArtifactKind, DeviceType

__all__ = [
    "compiler_parts",
    "default_libraries",
    "libraries_of",
    "request_of",
    "unshared_request",
]

_DEVICE: Final = DeviceType("gpu")
"""One device type for all GPUs: Triton's key contains the architecture. A guessed type, such as the
active GPU's, could be wrong, and the kernel would be stored twice. The hook checks the target in
the description of each fetched kernel."""

_READ: Final = re.compile(r"(?a:(TRITON|AMDGCN|NVPTX|PTXAS)_\w+)")

_SAME_KERNEL: Final = re.compile(
    r"TRITON_(CACHE_DIR|CACHE_MANAGER|REMOTE_CACHE_BACKEND|HOME|DUMP_DIR|OVERRIDE_DIR|REDIS_\w+)"
    r"|TRITON_(PTXAS|PTXAS_BLACKWELL|CUOBJDUMP|NVDISASM|LIBDEVICE|LIBCUDA|LIBHIP|CUDACRT|CUDART)_PATH"
    r"|TRITON_(HIP_LLD|AMD_CODEGEN)_PATH"
    r"|TRITON_(CUPTI|PROTON|ROCPROFILER|ROCTRACER|ROCTX|PROFILE|HSA)\w*|TRITON_ENABLE_NVTX"
    r"|TRITON_(ALWAYS_COMPILE|KERNEL_DUMP|KERNEL_OVERRIDE|FRONT_END_DEBUGGING|DUMP_PTXAS_LOG)"
    r"|TRITON_(PRINT_AUTOTUNING|CACHE_AUTOTUNING|ALLOW_NON_CONSTEXPR_GLOBALS|INTERPRET)"
    r"|TRITON_REPRODUCER_PATH|(NVPTX|AMDGCN)_ENABLE_DUMP"
)
"""Variables that change no kernel, such as paths and outputs. Parts contain the digests of the
assembler, the linker and the libraries."""

_FOREIGN_CODE: Final = ("TRITON_KERNEL_OVERRIDE", "TRITON_SWAP_MIR", "LLVM_PASS_PLUGIN_PATH")
"""Variables that add the user's files to the compilation. No key covers these files."""

_PLUGIN: Final = re.compile(r"(?a:TRITON_\w*PLUGIN\w*)")

_OFF: Final = frozenset({"", "0", "false", "off", "no", "n"})

_MAX_NAME_LENGTH: Final = 60  # `env.` is added, and a part's name has at most 64


def request_of(key: str, group: str, environ: Mapping[str, str], source: Any) -> CompileRequest:
    """Return the request for a kernel, with Triton's key and source.

    Raises:
        CacheError: no key covers everything that Triton compiles, or the source is None.
    """
    target = target_being_compiled()
    backend, arch = getattr(target, "backend", ""), getattr(target, "arch", "")
    parts = {
        **compiler_parts(environ, backend, arch),
        "triton": triton.__version__,
        "triton_key": key,
        "group": group,
        "form": getattr(source, "ext", ""),  # Triton 3.3 compiles a text by the name of its file
        "values": values_in(source),
        "libraries": libraries_of(options_being_compiled()),
    }
    if getattr(getattr(source, "language", None), "name", "") == "GLUON":
        parts["gluon"] = read_part(partial(_digest_of_package, "triton.experimental.gluon"))
    return CompileRequest.of(
        ArtifactKind.TRITON,
        _DEVICE,
        parts,
        toolchain=f"triton {triton.__version__}",
        label=group.partition(".")[0],
        details=partial(_details, source),
    )


def compiler_parts(environ: Mapping[str, str], backend: str, arch: Any) -> dict[str, str]:
    """Return what changes every kernel for a target, and Triton's keys omit.

    Args:
        environ: the environment variables.
        backend: Triton's name of the target's backend, e.g. `cuda`.
        arch: architecture of the target, e.g. 90.

    Raises:
        CacheError: no key covers everything that Triton compiles.
    """
    for name, value in environ.items():
        if value.lower() not in _OFF and (name in _FOREIGN_CODE or _PLUGIN.fullmatch(name)):
            raise CacheError(Reason.UNSHAREABLE, f"kernels are not shared: {name} is set")
    settings = {
        f"env.{name}": value
        for name, value in environ.items()
        if len(name) <= _MAX_NAME_LENGTH
        and _READ.fullmatch(name)
        and not _SAME_KERNEL.fullmatch(name)
    }
    # Triton's key contains these, but torch loads the kernels in its graphs without that key.
    others = {f"env.{name}": value for name, value in get_cache_invalidating_env_vars().items()}
    parts = {
        **others,
        **settings,
        "knobs": settings_of(environ),
        "ptxas": _ptxas(backend, arch),
        "library": read_part(partial(_digest_of_package, "triton", "*.py")),
        "runtime": read_part(partial(_digest_of_package, "triton.runtime")),
    }
    if backend == "hip":
        parts["linker"] = read_part(_sample_of_linker)
    if replaced := replacements():
        parts["replaced"] = replaced
    return parts


def libraries_of(options: Any) -> str:
    """Return digests of the libraries that `options` links, in the order of linking.

    Triton's key sorts the libraries for CUDA, and reads each file once in a process. For AMD, the
    key of Triton 3.3 contains the paths of the libraries, not their contents.
    """
    libraries = dict(getattr(options, "extern_libs", None) or ())
    return " ".join(f"{name}={contents_of(str(path))}" for name, path in libraries.items())


def default_libraries(backend: str, arch: Any) -> str:
    """Return `libraries_of` a kernel without options. Raises for a target without a compiler."""
    target = GPUTarget(backend, arch, 64 if backend == "hip" else 32)
    options = {"enable_fp_fusion": True}  # without this option, Triton 3.9 warns of its default
    return libraries_of(triton.compiler.compiler.make_backend(target).parse_options(options))


@cache
def _digest_of_package(name: str, pattern: str = "**/*.py") -> str:
    """Return a digest of the Python files of a loaded package of Triton, which Triton's key omits.
    The package parses kernels, or is their language.
    """
    digest = sha256()
    for folder in map(Path, sys.modules[name].__path__):
        for file in sorted(folder.glob(pattern)):
            content = sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(folder)} {content};".encode())
    return digest.hexdigest()


def _sample_of_linker() -> str:
    """Return the digest of the linker for AMD, or of the library that replaced it (3.9). Triton's
    key contains only its version.
    """
    compiler = backends["amd"].compiler
    find = getattr(compiler, "path_to_rocm_lld", globals_of(compiler).get("get_amd_codegen_path"))
    return "built in" if find is None else _sample(Path(find()))


def unshared_request(key: str, group: str) -> CompileRequest:
    """Return a request that is only counted, for a kernel that no key covers."""
    return CompileRequest.of(
        ArtifactKind.TRITON,
        _DEVICE,
        {"triton": triton.__version__, "triton_key": key, "group": group, "unshared": "1"},
        toolchain=f"triton {triton.__version__}",
        label=group.partition(".")[0],
    )


def _ptxas(backend: str, arch: Any) -> str:
    """Return the digest of CUDA's assembler, or "". Triton's key contains only its version, which
    another build may also report.
    """
    return read_part(partial(_sample_of_ptxas, arch)) if backend == "cuda" else ""


def _sample_of_ptxas(arch: int) -> str:
    tool = globals_of(backends["nvidia"].compiler)["get_ptxas"](arch)
    return _sample(Path(getattr(tool, "path", None) or tool[0]))


def _sample(path: Path) -> str:
    status = path.stat()
    return _sample_of_version(path, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _sample_of_version(path: Path, *_version: int) -> str:
    return sample_of(path)


def _argument(function: Any, place: Any) -> str:
    """Return the name of an argument that Triton identifies by position, such as `(2,)`."""
    names = getattr(function, "arg_names", ())
    match place:
        case (int(at),) if at < len(names):
            return str(names[at])
    return str(place)


def _details(source: Any) -> dict[str, str]:
    """Return the values that Triton's key hashes, to explain a miss."""
    function = getattr(source, "fn", None)
    signature = getattr(source, "signature", None) or {}
    constants = getattr(source, "constants", None) or {}
    attributes = getattr(source, "attrs", None) or {}
    details = {
        "signature": " ".join(f"{name}:{kind}" for name, kind in signature.items()),
        "constants": " ".join(
            f"{_argument(function, place)}={value}" for place, value in constants.items()
        ),
        **compiled_for(),
    }
    if isinstance(attributes, Mapping):
        details["attrs"] = " ".join(
            f"{_argument(function, place)}:{value}" for place, value in attributes.items()
        )
    return details | _details_of_function(function)


def _details_of_function(function: Any) -> dict[str, str]:
    text, name = getattr(function, "src", None), getattr(function, "__name__", "")
    key = str(getattr(function, "cache_key", ""))
    if not isinstance(text, str):
        return {"program": key}
    body = re.sub(rf"\bdef\s+{re.escape(name)}\b", "def", text)
    globals_read = getattr(function, "used_global_vals", None) or {}
    return {
        "program": sha256(body.encode()).hexdigest(),
        "function": str(name),
        "function_key": key,  # with the functions that it calls
        "line": str(getattr(function, "starting_line_number", "")),
        "globals": " ".join(
            f"{place[0]}={getattr(value[0], 'value', value[0])}".replace(" ", "")
            for place, value in globals_read.items()
        ),
    }
