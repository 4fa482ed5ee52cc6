"""The parts of an executable's fingerprint, including what torch_xla's own key omits.

torch_xla names a graph by a 128-bit hash of its nodes, torch_xla's git revisions, the `--xla*`
tokens of two environment variables and the serialized topology. Measurements on 2.7 show that other
inputs change the program but not the name: the matmul precision, `XLA_STABLEHLO_COMPILE`, the
parameter-wrapping threshold, a flag file, the libtpu version, the build of the library, attributes
of some operations (see `omitted`), and whether the thread that lowers a graph computes denormal
numbers as zero. The fingerprint contains all of these. It also contains the features of the CPU,
because torch_xla loads machine code without checking them, and on a CPU the number of threads in
XLA's pools.

This code runs in the middle of a training step, so it computes nothing on a device and creates no
tensor.
"""

import ctypes
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Final

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.experimental import plugins

from graphstash._compile.request import CompileRequest
from graphstash.hooks.client_options import text_of
from graphstash.hooks.device_libraries import gpu_parts, libtpu, toolkit
from graphstash.hooks.environment import (
    EnvironmentStates,
    cpu_device_type,
    cpu_features,
    flushed_denormals,
    libc,
    read_part,
)
from graphstash.hooks.labels import main_thread_line
from graphstash.hooks.torch_xla.omitted import omitted_attributes
from graphstash_schema import ArtifactKind, DeviceType

__all__ = ["Fingerprints"]

_PRECISION: Final = "_ZN9torch_xla10XlaHelpers19s_mat_mul_precisionE"
"""`torch_xla::XlaHelpers::s_mat_mul_precision`, an `xla::PrecisionConfig::Precision`."""

_NAMED_FILES: Final = frozenset({"flag_files", "xla_flag_file"})
"""Parts of the environment that change without a change of a variable."""

_PRECISIONS: Final = ("default", "high", "highest")
"""Names of the values of `xla::PrecisionConfig::Precision`."""


class Fingerprints:
    """Maps torch_xla's name of a graph to the key of its artifact.

    The constant parts are read once. The environment is recorded repeatedly: torch_xla reads some
    variables when its runtime starts, and others, such as `XLA_RNG_BIT_GENERATOR`, right after the
    look-up of the first graph that needs them.

    Raises:
        GateUnavailable: the calls that create operations cannot be intercepted in this process.
        ValueError: this build does not export the matmul precision.
    """

    def __init__(self) -> None:
        self._omitted = omitted_attributes()
        self._process_parts: Mapping[str, str] | None = None
        self._device_type: DeviceType | None = None
        self._environment = EnvironmentStates()
        self._has_changed = True  # since `snapshot` observed the environment
        self.observe_environment()
        self.observe_denormals()
        # torch_xla 2.7 has a setter but no getter in Python. The library exports the variable.
        self._precision = ctypes.c_int.in_dll(ctypes.CDLL(torch_xla._XLAC.__file__), _PRECISION)

    def observe_environment(self) -> None:
        """Record the environment variables. Call it at look-ups."""
        has_started = torch_xla._XLAC._xla_runtime_is_initialized()
        self._environment.observe(has_started=has_started)

    def observe_denormals(self) -> None:
        """Record how this thread computes denormal numbers. Call it after each change: the thread
        that looks up a graph is not the thread that lowers it.
        """
        self._denormals = flushed_denormals()

    def before_change(self) -> None:
        """Record the environment variables. Call it before each change of one."""
        self.observe_environment()
        self._has_changed = True

    def snapshot(self, *, observe: bool = False) -> object:
        """Return a value that differs after a change of what a compilation reads. It takes a few
        microseconds, unless it has to observe the environment or files that flags name.
        """
        known = self._environment.parts()
        if observe or self._has_changed or not _NAMED_FILES.isdisjoint(known):
            self._has_changed = False
            self.observe_environment()
            known = self._environment.parts()
        return known, self._precision.value

    def request(self, name: str) -> CompileRequest:
        """Return the request for the graph that torch_xla calls `name`."""
        if self._device_type is None:
            self._device_type = _device_type()
        return CompileRequest.of(
            ArtifactKind.TORCH_XLA,
            self._device_type,
            self.parts(name),
            toolchain=f"torch {torch.__version__}, torch_xla {torch_xla.__version__}",
            label=main_thread_line(),  # exact mode runs in another thread
            details=lambda: {"setting.mat_mul_precision": self._precision_name()},
        )

    def _precision_name(self) -> str:
        value = self._precision.value
        return _PRECISIONS[value] if 0 <= value < len(_PRECISIONS) else str(value)

    def why_unshared(self) -> str:
        """Return why the hook must not share graphs of this process, or an empty string."""
        mixed = [name for name, value in self._omitted.values().items() if not value]
        if not mixed:
            return ""
        return (
            "graphs are not shared, because torch_xla omits values from the name of a graph, and "
            f"this process used several values: {', '.join(mixed)}"
        )

    def parts(self, name: str) -> dict[str, str]:
        """Return the parts of a graph's fingerprint."""
        if self._process_parts is None:
            self._process_parts = _process_parts()
        self.observe_environment()
        is_on_cpu = self._process_parts["platform"] == "CPU"
        return {
            **self._process_parts,
            **self._environment.parts(),
            "graph": name,
            # Other devices compile in their own runtimes, not in the pools of this library.
            "threads": self._omitted.threads() if is_on_cpu else "",
            "omitted_attributes": json.dumps(self._omitted.values(), sort_keys=True),
            "matmul_precision": str(self._precision.value),
            **({"flushed_denormals": self._denormals} if self._denormals else {}),
        }


def _process_parts() -> dict[str, str]:
    of_gpus = {}
    if xr.device_type() in {"CUDA", "ROCM"}:
        folders = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
        of_gpus = {**gpu_parts(), "toolkit": toolkit(folders)}
    return {
        **of_gpus,
        "torch": torch.__version__,
        "torch_xla": torch_xla.__version__,
        "git_revisions": read_part(lambda: sorted(torch_xla._XLAC._get_git_revs().items())),
        "library": read_part(_library_hash),
        "libtpu": read_part(lambda: metadata.version("libtpu")),
        "libtpu_library": libtpu(),
        "platform": read_part(xr.device_type),
        "device_kind": read_part(lambda: torch_xla._XLAC._xla_device_kind("xla:0")),
        "devices": read_part(torch_xla._XLAC._xla_get_all_device_attributes),
        "device_count": read_part(xr.global_runtime_device_count),
        "process_count": read_part(xr.process_count),
        "spmd": read_part(xr.is_spmd),
        "auto_sharding": read_part(torch_xla._XLAC._xla_get_auto_sharding),
        "machine": platform.machine(),
        "client_options": read_part(_client_options),
        "libc": libc(),
        "cpu_features": read_part(lambda: " ".join(cpu_features())),
    }


def _client_options() -> str:
    """Return the options that torch_xla passes to the client of a plug-in."""
    plugin = plugins._plugin_registry.get(xr.device_type())
    return text_of(plugin.client_create_options()) if plugin is not None else ""


def _library_hash() -> str:
    """Return the hash that the wheel records for the extension, to avoid reading its 400 MB."""
    return " ".join(
        str(file.hash.value)
        for file in metadata.files("torch_xla") or ()
        if file.name.startswith("_XLAC.") and file.hash is not None
    )


def _device_type() -> DeviceType:
    name = str(xr.device_type() or "unknown").lower()
    if name == "cpu":
        return cpu_device_type()
    kind = read_part(lambda: torch_xla._XLAC._xla_device_kind("xla:0"))
    devices = read_part(torch_xla._XLAC._xla_get_all_device_attributes)
    topology = hashlib.sha256(devices.encode()).hexdigest()[:16]
    count = read_part(xr.global_runtime_device_count)
    return DeviceType.of(name, kind, count, topology)
