"""The parts of a process's environment, host and libraries that change an executable."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from graphstash_schema import DeviceType

__all__ = [
    "EnvironmentStates",
    "cpu_device_type",
    "cpu_features",
    "cpu_model",
    "environment_parts",
    "installed_pjrt_plugins",
    "libc",
    "read_part",
    "sample_of",
    "version_of",
]

_READ: Final = re.compile(
    r"(?a:(XLA|LIBTPU|TPU|PJRT|NEURON)_\w+|CPU_NUM_DEVICES|MEGASCALE_NUM_SLICES)"
)
"""Variables that frameworks, the runtime, libtpu or the Neuron plug-in read."""

_SAME_EXECUTABLE: Final = re.compile(
    r"XLA_(PERSISTENT_CACHE|METRICS|FNTRACKER|SAVE|DUMP|COMPILATION_CACHE_SIZE)\w*"
    r"|TPU_(WORKER_ID|WORKER_HOSTNAMES|PROCESS_ADDRESSES|PROCESS_PORT|STDERR_LOG_LEVEL"
    r"|MIN_LOG_LEVEL|LOG_DIR|VISIBLE_CHIPS|VISIBLE_DEVICES|SKIP_MDS_QUERY|NAME)"
    r"|TPU_(RUNTIME_METRICS_PORTS|LIBRARY_PATH)"
    r"|PJRT_(LOCAL_PROCESS_RANK|LOCAL_PROCESS_COUNT|ALLOCATOR_\w+|DIST_SERVICE_ADDR)"
    r"|XLA_COORDINATOR_PORT"
    r"|NEURON_(RT_\w+|LIBRARY_PATH|COMPILE_CACHE_URL|PJRT_PROCESS_INDEX)"
)
"""Exceptions: variables that identify the host, rank or job, or name a place to read, write or log.

If a rank's number were in the fingerprint, ranks would share nothing. The loaded libtpu is a part
of its own."""

_FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

_MAX_NAME_LENGTH: Final = 60
"""A part's name has at most 64 characters. No variable that is read has more than 40."""

_WHERE_TO_WRITE: Final = re.compile(r"--xla_dump_\w+(=\S*)?")

_SAMPLE_BYTES: Final = 1024**2

_PLUGIN_GROUPS: Final = ("jax_plugins", "torch_xla.plugins")
"""Entry-point groups in which PJRT plug-ins register."""

_NO_PLUGINS: Final = ("graphstash", "torch_xla")
"""Distributions in these groups that are not plug-ins."""

_PLUGINS: Final = ("libtpu", "libneuronxla")
"""Distributions of plug-ins that frameworks find without an entry point."""

_CPUINFO: Final = Path("/proc/cpuinfo")


def environment_parts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change an executable, as parts named `env.<NAME>`.

    Omits `--xla_dump_*` tokens, which only name a place to write. Includes the contents of a flag
    file that `XLA_FLAGS` names, because compilers hash at most the name of the file.
    """
    parts = {}
    for name, value in environ.items():
        if len(name) <= _MAX_NAME_LENGTH and _is_read(name):
            tokens = _WHERE_TO_WRITE.sub("", value).split()
            if all(token.startswith("-") for token in tokens):  # else `--flag value`, in this order
                # Sort by flag instead of by token: the last occurrence of a repeated flag counts.
                tokens.sort(key=_flag)
            if tokens or name not in _FLAGS:  # without flags, the variable may as well be absent
                parts[f"env.{name}"] = " ".join(tokens)
            if name == "XLA_FLAGS":
                for file in (token for token in tokens if not token.startswith("-")):
                    parts["xla_flag_file"] = read_part(partial(Path(file).read_text, "utf-8"))
    return parts


class EnvironmentStates:
    """The states of the variables that a compiler reads, in the order of observation.

    Compilers read some variables when they start, and others at the first program that needs them.
    A compilation can therefore depend on an earlier state, so a key contains all states.
    """

    def __init__(self, *, without: Collection[str] = ()) -> None:
        self._without = frozenset(without)
        self._states: list[tuple[bool, dict[str, str]]] = []

    def observe(self, *, has_started: bool = True) -> None:
        """Add the current state if it differs from the last one.

        Args:
            has_started: whether the compiler has read its start-up variables.
        """
        state = {
            name: value
            for name, value in environment_parts(os.environ).items()
            if name not in self._without
        }
        if self._states[-1:] != [(has_started, state)]:
            self._states.append((has_started, state))

    def parts(self) -> dict[str, str]:
        """Return the last state as parts, with a digest of any earlier states.

        If the variables never change, the parts equal those of `environment_parts`.
        """
        states = list(self._states)
        # The start alone changes nothing: a state that lasts over the start is one state.
        following = [*states[1:], (False, None)]
        *earlier, (_, last) = [
            each for each, later in zip(states, following, strict=True) if each[1] != later[1]
        ]
        if not earlier:
            return dict(last)
        lines = json.dumps([(started, sorted(state.items())) for started, state in earlier])
        return {**last, "environment_before": hashlib.sha256(lines.encode()).hexdigest()}


def sample_of(library: Path) -> str:
    """Return the size of a file and a hash of its beginning and end, to distinguish builds.

    The first and last MiB hold the build ID, symbols and tables, so that a process need not read
    hundreds of megabytes.

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
    """Return a part, or a placeholder if reading fails: hosts without the part still share."""
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
    """The distributions that contain a PJRT plug-in."""
    announced = {
        point.dist.name
        for group in _PLUGIN_GROUPS
        for point in metadata.entry_points(group=group)
        if point.dist is not None and point.dist.name.replace("-", "_") not in _NO_PLUGINS
    }
    return sorted(announced | {name for name in _PLUGINS if version_of(name)})


def cpu_features() -> list[str]:
    """Return the sorted instruction-set features of this host's CPU, as the kernel lists them."""
    return sorted(set(_cpuinfo("flags", "Features").split()))


def cpu_model() -> str:
    """Return the CPU's model name. Compilers tune for the model under `-march=native`."""
    return " ".join(
        _cpuinfo(name) for name in ("vendor_id", "cpu family", "model", "model name", "CPU part")
    )


def libc() -> str:
    """Return name and version of the C library, e.g. `glibc-2.36`."""
    return "-".join(platform.libc_ver())


def cpu_device_type() -> DeviceType:
    """Return the device type of this host's CPU."""
    return DeviceType.cpu(platform.machine(), cpu_features())


def _is_read(name: str) -> bool:
    return bool(_READ.fullmatch(name)) and not _SAME_EXECUTABLE.fullmatch(name)


def _flag(token: str) -> str:
    return token.partition("=")[0]


@cache
def _cpuinfo(*names: str) -> str:
    """Return the first value under one of the names, or an empty string."""
    try:
        lines = _CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
