"""Fingerprint parts: the environment, host and libraries of a process that change an executable."""

import hashlib
import json
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from graphstash.hooks.named_files import contents_of, is_output
from graphstash_schema import DeviceType

__all__ = [
    "EnvironmentStates",
    "cpu_device_type",
    "cpu_features",
    "cpu_model",
    "environment_parts",
    "flushed_denormals",
    "installed_pjrt_plugins",
    "libc",
    "omitted_flags",
    "read_part",
    "sample_of",
    "threads",
    "threads_of_running_client",
    "variables_for_gpus",
    "version_of",
]

_READ: Final = re.compile(
    r"(?a:(XLA|LIBTPU|TPU|PJRT|NEURON)_\w+|CPU_NUM_DEVICES|MEGASCALE_NUM_SLICES)"
)
"""Names of variables that frameworks, PJRT, libtpu or the Neuron plug-in read."""

_READ_FOR_GPUS: Final = re.compile(
    r"(?a:TF_ENABLE_WINOGRAD_NONFUSED|TF_FP16_(CONV|RNN)_USE_FP32_COMPUTE|NVIDIA_TF32_OVERRIDE"
    r"|TF_USE_(CUDNN_BATCHNORM_SPATIAL_PERSISTENT|ROCM_NHWC)|PJRT_GPU_SE_DISABLE_TARGET_CONFIG"
    r"|TRITON_PREFER_TMEM_16x256_LAYOUT|ALLOW_LHS_TMEM_LAYOUT_CONVERSION)"
)
"""Names of variables with which XLA chooses algorithms of cuDNN, and its passes of Triton choose
layouts. The plug-in of jaxlib 0.10.2 for CUDA contains them, except NVIDIA's."""

_SAME_EXECUTABLE: Final = re.compile(
    r"XLA_(PERSISTENT_CACHE|METRICS|FNTRACKER|SAVE|DUMP|COMPILATION_CACHE_SIZE)\w*"
    r"|TPU_(WORKER_ID|WORKER_HOSTNAMES|PROCESS_ADDRESSES|PROCESS_PORT|STDERR_LOG_LEVEL"
    r"|MIN_LOG_LEVEL|LOG_DIR|VISIBLE_CHIPS|VISIBLE_DEVICES|SKIP_MDS_QUERY|NAME)"
    r"|TPU_(RUNTIME_\w*METRIC\w*|LIBRARY_PATH|HOSTNAME_OVERRIDE|VISIBLE_DEVICE_PATHS|VMODULE)"
    r"|TPU_(ML_PLATFORM(_VERSION)?|VLOG_LEVEL|MAX_LOG_SIZE_MB|CORE_DUMP_DIRECTORY)"
    r"|PJRT_(LOCAL_PROCESS_RANK|LOCAL_PROCESS_COUNT|ALLOCATOR_\w+|DIST_SERVICE_ADDR)"
    r"|XLA_COORDINATOR_PORT"
    r"|NEURON_(RT_\w+|LIBRARY_PATH|COMPILE_CACHE_URL|PJRT_PROCESS_INDEX)"
)
"""Names of variables outside the fingerprint: they identify the host, rank, job or framework, name
a path, or change only logs. libtpu 0.0.42.1 reads the variables that begin with `TPU_`.

If the fingerprint contained the rank's number, ranks would share nothing. It contains the loaded
libtpu instead of its path."""

_FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

_MAX_NAME_LENGTH: Final = 60
"""Maximum length of a variable's name, so that a part's name has at most 64 characters."""

_INITIAL_FLAGS: Final = "env.LIBTPU_INIT_ARGS"

_DUMP_FLAG: Final = re.compile(r"--xla_dump_\w+(=\S*)?")

_SAMPLE_BYTES: Final = 1024**2

_PLUGIN_GROUPS: Final = ("jax_plugins", "torch_xla.plugins")
"""Entry-point groups in which PJRT plug-ins register."""

_NOT_PLUGINS: Final = ("graphstash", "torch_xla")
"""Distributions that use these groups without being plug-ins."""

_UNREGISTERED_PLUGINS: Final = ("libtpu", "libneuronxla")
"""Distributions of plug-ins that frameworks find without an entry point."""

_CPUINFO: Final = Path("/proc/cpuinfo")

_DENORMAL: Final[float] = 5e-324
"""The smallest positive number, which is denormal."""

_THREAD: Final = "tf_XLAEigen"
"""Name of the threads with which an XLA client runs programs on a CPU."""


def environment_parts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change an executable, as parts named `env.<NAME>`.

    Omits `--xla_dump_*` flags, which do not change the executable. Includes the contents of a flag
    file that `XLA_FLAGS` names, and digests of the files and directories that flags name, such as
    `--xla_gpu_ptx_file` and `--flagfile`, because compilers hash at most their names.
    """
    parts = {}
    files = []
    for name, value in environ.items():
        if len(name) <= _MAX_NAME_LENGTH and _is_read(name):
            tokens = _DUMP_FLAG.sub("", value).split()
            if all(token.startswith("-") for token in tokens):  # `--flag value` must stay in order
                # Sort by flag, not by token: the last occurrence of a repeated flag counts.
                tokens.sort(key=_flag_name)
            if name in _FLAGS:
                files += _files_of(tokens)
            if tokens or name not in _FLAGS:  # no flags: like an absent variable
                parts[f"env.{name}"] = " ".join(tokens)
            if name == "XLA_FLAGS":
                for file in (token for token in tokens if not token.startswith("-")):
                    text = read_part(partial(Path(file).read_text, "utf-8"))
                    parts["xla_flag_file"] = text
                    files += _files_of(text.split())
    if files:
        parts["flag_files"] = " ".join(files)
    return parts


def omitted_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what JAX's key omits: the contents of the files that flags name, and the order of
    repeated libtpu flags. JAX sorts the flags, but the last value of a repeated flag counts.
    """
    parts = environment_parts({name: environ[name] for name in _FLAGS if name in environ})
    flags = [*map(_flag_name, parts.get(_INITIAL_FLAGS, "").split())]
    found = {"flag_files"} | ({_INITIAL_FLAGS} if len(set(flags)) < len(flags) else set())
    return {name: value for name, value in parts.items() if name in found}


def variables_for_gpus(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change an executable for a GPU and that JAX's key omits."""
    return {
        f"env.{name}": value for name, value in environ.items() if _READ_FOR_GPUS.fullmatch(name)
    }


class EnvironmentStates:
    """History of the variables that a compiler reads, except the parts in `without`.

    Compilers read some variables when they start, and others at the first program that needs them.
    A compilation can therefore depend on an earlier state, so a key contains all states.
    """

    def __init__(self, *, without: Collection[str] = ()) -> None:
        self._without = frozenset(without)
        self._states: list[tuple[bool, dict[str, str]]] = []

    def observe(self, *, has_started: bool = True) -> None:
        """Add the current state if it differs from the last one.

        `has_started`: whether the compiler has read its start-up variables.
        """
        state = {
            name: value
            for name, value in environment_parts(os.environ).items()
            if name not in self._without
        }
        if self._states[-1:] != [(has_started, state)]:
            self._states.append((has_started, state))

    def parts(self) -> dict[str, str]:
        """Return the parts of the last state, and a digest of earlier states if there are any."""
        states = list(self._states)
        # States that differ only in `has_started` count as one.
        following = [*states[1:], (False, None)]
        *earlier, (_, last) = [
            each for each, later in zip(states, following, strict=True) if each[1] != later[1]
        ]
        if not earlier:
            return dict(last)
        lines = json.dumps([(started, sorted(state.items())) for started, state in earlier])
        return {**last, "environment_before": hashlib.sha256(lines.encode()).hexdigest()}


def sample_of(library: Path) -> str:
    """Return the size of a file and a hash of its first and last MiB, to distinguish builds.

    They contain the build ID, symbols and tables. Reading hundreds of MiB would take too long.

    Raises:
        OSError: the file cannot be read.
    """
    size = library.stat().st_size
    with library.open("rb") as file:
        hasher = hashlib.sha256(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        hasher.update(file.read())
    return f"{size} {hasher.hexdigest()}"


def read_part(source: Callable[[], Any]) -> str:
    """Return a part, or a placeholder on error, so that hosts without the part can share."""
    try:
        return str(source())
    except Exception as error:  # noqa: BLE001 - compilers and bindings may raise any exception
        return f"none ({type(error).__name__})"


@cache
def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def installed_pjrt_plugins() -> list[str]:
    """Return the installed distributions that contain a PJRT plug-in."""
    announced = {
        point.dist.name
        for group in _PLUGIN_GROUPS
        for point in metadata.entry_points(group=group)
        if point.dist is not None and point.dist.name.replace("-", "_") not in _NOT_PLUGINS
    }
    return sorted(announced | {name for name in _UNREGISTERED_PLUGINS if version_of(name)})


def cpu_features() -> list[str]:
    """Return the sorted instruction-set features of this host's CPU, as the kernel lists them."""
    return sorted(set(_cpuinfo("flags", "Features").split()))


def cpu_model() -> str:
    """Return the CPU's vendor, family and model, for which `-march=native` tunes."""
    return " ".join(
        _cpuinfo(name) for name in ("vendor_id", "cpu family", "model", "model name", "CPU part")
    )


def flushed_denormals() -> str:
    """Return which denormal numbers this thread computes as zero: results, operands or both.

    Compilers compute and convert constants. torch has a setter but no getter, and a library that
    was built with `-ffast-math` may set this state when it is loaded.
    """
    is_flushed = {
        "results": struct.pack("<d", sys.float_info.min / 2) == bytes(8),
        "operands": _DENORMAL == 0,
    }
    return " ".join(name for name, is_zero in is_flushed.items() if is_zero)


def threads() -> str:
    """Return the number of threads for which a new XLA client compiles on a CPU."""
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return given or str(len(os.sched_getaffinity(os.getpid())))


def threads_of_running_client() -> str:
    """Return the number of threads for which an XLA client that has started compiles on a CPU.

    The variables and the CPU affinity may have changed since the client started. The function
    therefore counts the threads that XLA has named. If the count differs from the number that a new
    client would get, it returns both numbers, because the counted threads may belong to several
    clients. Processes with only one of these numbers then have other keys. JAX 0.4.31 names no
    threads; the function then assumes that nothing has changed.
    """
    now = threads()
    started = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            started += task.joinpath("comm").read_text().strip() == _THREAD
    return now if str(started) in ("0", now) else f"{started} (now {now})"


def libc() -> str:
    """Return the name and version of the C library, e.g. `glibc-2.36`."""
    return "-".join(platform.libc_ver())


def cpu_device_type() -> DeviceType:
    """Return the device type of this host's CPU."""
    return DeviceType.cpu(platform.machine(), cpu_features())


def _is_read(name: str) -> bool:
    is_read = _READ.fullmatch(name) or _READ_FOR_GPUS.fullmatch(name)
    return bool(is_read) and not _SAME_EXECUTABLE.fullmatch(name)


def _files_of(tokens: Iterable[str]) -> list[str]:
    """Return each flag that names a file or directory, with a digest of its contents."""
    named = (token.partition("=") for token in tokens)
    return [
        f"{flag}={contents}"
        for flag, _, name in named
        if not is_output(flag) and (contents := contents_of(name.strip("'\"")))
    ]


def _flag_name(token: str) -> str:
    return token.partition("=")[0]


@cache
def _cpuinfo(*names: str) -> str:
    """Return the value of the first line of /proc/cpuinfo with one of the names, or ""."""
    try:
        lines = _CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
