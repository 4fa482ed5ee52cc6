"""What an executable is made of: the parts of its fingerprint.

PJRT has no key of its own. The parts are everything that the compiler is given (program, options,
description of the devices), which build of the plug-in compiles, and what both read beside that:
flags in the environment and, on a CPU, its features. An accelerator's executable is not bound to
the features of its host's CPU: one that was compiled ahead of time elsewhere is found.
"""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Final

from graphstash.hooks.environment import environment_parts, version_of
from graphstash.hooks.host import cpu_features, libc
from graphstash.hooks.pjrt.abi import AheadOfTimeArgs, ClientCompileArgs, Program
from graphstash.hooks.pjrt.api import view_of
from graphstash.hooks.pjrt.canonical import canonical
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash.hooks.pjrt.topology import Topology

__all__ = ["Fingerprints", "is_portable", "toolchain"]

_CALLBACK: Final = re.compile(rb"python_(cpu|gpu)_callback")
"""Custom calls by which JAX calls back into Python, at the address of a function."""

_WHERE_TO_LOAD: Final = frozenset(
    f"env.{name}" for name in ("PJRT_DEVICE", "PJRT_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")
)
"""They choose the plug-in, which is a part of its own, wherever it lies."""


def is_portable(code: memoryview) -> bool:
    """Whether a program means the same in another process."""
    return _CALLBACK.search(code) is None


class Fingerprints:
    """Describes what one plug-in compiles.

    The environment is read on first use, right before the first compile: that is when XLA reads it.
    """

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._environment: Mapping[str, str] | None = None

    def parts(
        self, args: ClientCompileArgs | AheadOfTimeArgs, topology: Topology
    ) -> dict[str, str] | None:
        """Everything that decides what is compiled; None for a program that no other process has.

        Raises:
            OSError: the plug-in's file cannot be read.
        """
        program = Program.from_address(args.program)
        code = view_of(program.code, program.code_size)
        if not is_portable(code):
            return None
        if self._environment is None:
            self._environment = {
                name: value
                for name, value in environment_parts(os.environ).items()
                if name not in _WHERE_TO_LOAD
            }
        options = bytes(view_of(args.options, args.options_size))
        api = self._plugin.api
        parts = {
            **self._environment,
            "format": bytes(view_of(program.format, program.format_size)).decode("ascii"),
            "program": hashlib.sha256(code).hexdigest(),
            "options": hashlib.sha256(canonical(options)).hexdigest(),
            "platform": topology.platform,
            "platform_version": topology.version,
            "topology": topology.digest,
            "plugin": self._plugin.identity,
            "api": f"{api.major}.{api.minor}",
            "machine": platform.machine(),
        }
        if topology.platform.lower() == "cpu":
            parts |= {"libc": libc(), "cpu_features": " ".join(cpu_features())}
        if topology.platform.lower() == "neuron":  # the plug-in calls a compiler beside it
            parts["compiler"] = version_of("neuronx-cc") or "none"
        return parts


def toolchain(plugin: Plugin) -> str:
    """Versions, for people and for retention."""
    frameworks = [
        f"{name} {sys.modules[name].__version__}"
        for name in ("torch_xla", "jax")
        if hasattr(sys.modules.get(name), "__version__")
    ]
    api = plugin.api
    return ", ".join([*frameworks, f"{plugin.path.name} (PJRT {api.major}.{api.minor})"])
