"""The device type that torch computes on."""

from functools import cache

import torch

from graphstash.hooks.environment import cpu_device_type
from graphstash_schema import DeviceType

__all__ = ["accelerator", "device_type_of"]


def accelerator() -> str:
    """Return torch's name of this process's accelerator, e.g. `cuda`, or `cpu` without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type


@cache
def device_type_of(kind: str) -> DeviceType:
    """Return architecture and device name: the fastest code differs between devices."""
    if kind == "cpu":
        return cpu_device_type()
    name = torch.get_device_module(kind).get_device_name()
    if kind != "cuda" or torch.version.hip is not None:
        return DeviceType.of(kind, name)
    major, minor = torch.cuda.get_device_capability()
    return DeviceType.of(kind, f"sm_{major}{minor}", name)
