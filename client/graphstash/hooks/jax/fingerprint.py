"""Fingerprint and device type of an executable.

JAX's key covers the program, jaxlib, the platform and its version, XLA's flags, the compile options
and the topology (`jax._src.cache_key`). The fingerprint adds:

- The CPU's features, because an executable for another CPU crashes with SIGILL. According to
  measurements, JAX 0.4.31 to 0.12.0 include them in a CPU's topology.
- The number of the CPU client's threads. XLA splits loops for it, which changes the order of sums.
- The version of libtpu, which JAX's key omits before 0.6 (jax-ml/jax#27814), and a sample of the
  loaded libtpu, which TPU_LIBRARY_PATH may name. On TPU v4, the variable that joins two cores.
- The versions of the GPU's driver and libraries, see `device_libraries`.
- Variables that XLA reads when it compiles for a GPU, which JAX's key omits.
- The toolkit that XLA uses for a GPU, which JAX's key omits, see `device_libraries`.
- The contents of files that flags or options of the program name, see `named_files`.
- The order of libtpu's flags if one is repeated.
- The options of a plug-in's client, see `client_options`.
- Which of the program's custom calls XLA partitions by rows, see `partitioners`.

The traits of FFI handlers are absent: they do not change a serialized executable (measured with
jaxlib 0.10.2 for CUDA). XLA calls the handler that the running process has registered.
"""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax
from jax._src import cache_key

from graphstash._compile.request import CompileRequest
from graphstash.hooks import device_libraries, environment
from graphstash.hooks.environment import version_of
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.program_text import details_of, settings
from graphstash.hooks.labels import function_label
from graphstash.hooks.named_files import option_files, toolkits_in
from graphstash_schema import ArtifactKind, DeviceType

__all__ = ["device_key", "request_of"]

_DEVICE_KEY_DIGITS: Final = 16


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
        **environment.omitted_flags(os.environ),
    }
    options = b"" if program.options is None else bytes(program.options.SerializeAsString())
    parts |= option_files(options)
    if program.platform == "cpu" or not program.is_watched:
        parts["cpu_features"] = " ".join(environment.cpu_features())
        parts["threads"] = program.threads
    if program.platform == "tpu":
        parts["libtpu"] = version_of("libtpu") or version_of("libtpu-nightly")
        parts["libtpu_library"] = device_libraries.libtpu()
        parts["megacore"] = os.environ.get("TPU_MEGACORE", "")
    elif program.platform == "gpu":
        parts |= device_libraries.gpu_parts() | environment.variables_for_gpus(os.environ)
        parts["toolkit"] = device_libraries.toolkit(toolkits_in(options))
    if program.client_options:
        parts["client_options"] = program.client_options
    if program.partitioned_by_rows:
        parts["partitioned_by_rows"] = program.partitioned_by_rows
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
    if program.platform == "tpu" and not program.is_compile_only:
        details["device_key"] = device_key(program)
    if program.options is not None:
        details["compile_options"] = hashlib.sha256(program.options.SerializeAsString()).hexdigest()
        overrides = getattr(program.options, "env_option_overrides", ())
        details["compiler_options"] = " ".join(f"{name}={value}" for name, value in overrides)
    return details


def device_key(program: Program) -> str:
    """Return digests of what the host and its devices add to JAX's key, in words such as
    `topology=<16 hex>`, or "" if this version of JAX is not understood.

    A job on a device stores these words with its programs. `graphstash farm` compiles for a device
    only if a job there has stored the same words.
    """
    if program.placement is None or program.options is None:
        return ""
    backend = program.device.client
    hashes: dict[str, Callable[[Any], object]] = {
        "topology": lambda digest: cache_key._hash_accelerator_config(digest, program.placement),
        "platform_version": lambda digest: cache_key._hash_platform(digest, backend),
        "flags": lambda digest: cache_key._hash_xla_flags(digest, cache_key.get_flag_prefixes()),
        "devices": lambda digest: digest.update(str(program.options.device_assignment).encode()),
    }
    words = []
    try:
        for name, add_to in hashes.items():
            digest = hashlib.sha256()
            add_to(digest)
            words.append(f"{name}={digest.hexdigest()[:_DEVICE_KEY_DIGITS]}")
    except (AttributeError, RuntimeError, TypeError):  # another release of JAX, or of the plug-in
        return ""
    return " ".join(words)


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
