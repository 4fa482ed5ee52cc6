"""What decides which CPU and C library can run a compiled function: the same for all hooks."""

import platform
from pathlib import Path
from typing import Final

from graphstash_schema import DeviceType

__all__ = ["cpu_device_type", "cpu_features", "cpu_model", "libc"]

_CPUINFO: Final = Path("/proc/cpuinfo")


def cpu_features() -> list[str]:
    """The instruction-set features of this host's CPU, as the kernel lists them; sorted."""
    return sorted(set(_cpuinfo("flags", "Features").split()))


def cpu_model() -> str:
    """What the CPU calls itself; compilers tune for it under `-march=native`."""
    return " ".join(
        _cpuinfo(name) for name in ("vendor_id", "cpu family", "model", "model name", "CPU part")
    )


def libc() -> str:
    """Name and version of the C library, e.g. `glibc-2.36`."""
    return "-".join(platform.libc_ver())


def cpu_device_type() -> DeviceType:
    """The device type of this host's CPU."""
    return DeviceType.cpu(platform.machine(), cpu_features())


def _cpuinfo(*names: str) -> str:
    """The first value under one of the names; empty where the kernel does not say."""
    try:
        lines = _CPUINFO.read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
