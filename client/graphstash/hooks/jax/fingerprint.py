"""What JAX's own key leaves out: the parts of an executable's fingerprint, and its device type.

JAX's key covers the program, jaxlib, the platform and its version, XLA's flags, the compile options
and the topology (`jax._src.cache_key`). Measured on 0.4.31 to 0.12.0, the topology of a CPU names
its features; they are parts here all the same, because an executable for another CPU ends in
SIGILL. libtpu's version was not in the key before jax 0.6 (jax-ml/jax#27814), and the versions of
the CUDA libraries that a GPU executable was tuned with are in none.
"""

import re
from functools import cache
from importlib import metadata
from typing import Any, Final

import jax

from graphstash._compile.request import CompileRequest
from graphstash.hooks import environment
from graphstash.hooks.environment import version_of
from graphstash.hooks.jax.compiling import Program
from graphstash_schema import ArtifactKind, DeviceType

__all__ = ["request_of"]

_GPU_LIBRARIES: Final = re.compile(r"(jax[-_](cuda|rocm)|nvidia[-_])[\w-]*", re.IGNORECASE)


def request_of(jax_key: str, program: Program) -> CompileRequest:
    """What is looked up for a program.

    `jax_key` is `<module>-<sha256>`, as JAX passes it to its cache.
    """
    parts = {
        "jax_key": jax_key,
        "jax": str(jax.__version__),
        "jaxlib": version_of("jaxlib"),
        "device_kind": str(program.device.device_kind),
    }
    if program.platform == "cpu" or not program.is_watched:
        parts["cpu_features"] = " ".join(environment.cpu_features())
    if program.platform == "tpu":
        parts["libtpu"] = version_of("libtpu") or version_of("libtpu-nightly")
    elif program.platform == "gpu":
        parts["libraries"] = _gpu_libraries()
    return CompileRequest.of(
        ArtifactKind.JAX,
        _device_type(program),
        parts,
        toolchain=f"jax {parts['jax']} jaxlib {parts['jaxlib']}",
    )


def _device_type(program: Program) -> DeviceType:
    kind = str(program.device.device_kind)
    match program.platform:
        case "cpu":
            return environment.cpu_device_type()
        case "gpu":
            capability = str(getattr(program.device, "compute_capability", kind))
            if capability.startswith("gfx"):
                return DeviceType.of("rocm", capability)
            return DeviceType.of("cuda", "sm_" + capability.replace(".", ""))
        case "tpu":
            return DeviceType.of("tpu", kind.lower().removeprefix("tpu"), _bounds(program))
        case other:
            return DeviceType.of(other, kind)


def _bounds(program: Program) -> str:
    """How the chips of a slice are arranged, e.g. `2x2x1`; their number where they do not say."""
    places: list[Any] = [getattr(device, "coords", None) for device in program.devices]
    if not all(places):
        return str(len(places))
    return "x".join(str(max(axis) + 1) for axis in zip(*places, strict=True))


@cache
def _gpu_libraries() -> str:
    """The plug-in and the CUDA libraries beside it, as far as they came from wheels."""
    found = {
        f"{name.lower()}={distribution.version}"
        for distribution in metadata.distributions()
        if _GPU_LIBRARIES.fullmatch(name := str(distribution.metadata["Name"]))
    }
    return " ".join(sorted(found))
