"""Fingerprint and device type of an executable.

JAX's key covers the program, jaxlib, the platform and its version, XLA's flags, the compile options
and the topology (`jax._src.cache_key`). The fingerprint adds:

- The CPU's features, because an executable for another CPU crashes with SIGILL. According to
  measurements, JAX 0.4.31 to 0.12.0 include them in a CPU's topology.
- The number of the CPU client's threads. XLA splits loops for it, which changes the order of sums.
- The version of libtpu, which JAX's key omits before 0.6 (jax-ml/jax#27814), and a sample of the
  loaded libtpu, which TPU_LIBRARY_PATH may name. On TPU v4, the variable that joins two cores.
- The versions of the GPU's driver and libraries, see `device_libraries`.
"""

import hashlib
import os
from functools import partial
from typing import Any

import jax

from graphstash._compile.request import CompileRequest
from graphstash.hooks import device_libraries, environment
from graphstash.hooks.environment import version_of
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.program_text import details_of, settings
from graphstash.hooks.labels import function_label
from graphstash_schema import ArtifactKind, DeviceType

__all__ = ["request_of"]


def request_of(jax_key: str, program: Program, *, label: str = "") -> CompileRequest:
    """Return the request for a program whose key in JAX's cache is `<module>-<sha256>`.

    The label is a name for display. Default: the module's name.
    """
    parts = {
        "jax_key": jax_key,
        "jax": str(jax.__version__),
        "jaxlib": version_of("jaxlib"),
        "device_kind": str(program.device.device_kind),
        **program.environment,
    }
    if program.platform == "cpu" or not program.is_watched:
        parts["cpu_features"] = " ".join(environment.cpu_features())
        parts["threads"] = program.threads
    if program.platform == "tpu":
        parts["libtpu"] = version_of("libtpu") or version_of("libtpu-nightly")
        parts["libtpu_library"] = device_libraries.libtpu()
        parts["megacore"] = os.environ.get("TPU_MEGACORE", "")
    elif program.platform == "gpu":
        parts |= device_libraries.gpu_parts()
    label = label or function_label(jax_key.rpartition("-")[0])
    return CompileRequest.of(
        ArtifactKind.JAX,
        _device_type(program),
        parts,
        toolchain=f"jax {parts['jax']} jaxlib {parts['jaxlib']}",
        label=label,
        details=partial(_details, program, label),
    )


def _details(program: Program, label: str) -> dict[str, str]:
    """Return environment variables and inputs of JAX's key, to explain a miss."""
    details = environment.environment_parts(os.environ) | settings()
    if program.computation is not None:
        details |= {"function": label, **details_of(program.computation)}
    if program.options is not None:
        details["compile_options"] = hashlib.sha256(program.options.SerializeAsString()).hexdigest()
        overrides = getattr(program.options, "env_option_overrides", ())
        details["compiler_options"] = " ".join(f"{name}={value}" for name, value in overrides)
    return details


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
    """Return a slice's shape in chips, e.g. `2x2x1`, or the number of devices if unknown."""
    places: list[Any] = [getattr(device, "coords", None) for device in program.devices]
    if not all(places):
        return str(len(places))
    return "x".join(str(max(axis) + 1) for axis in zip(*places, strict=True))
