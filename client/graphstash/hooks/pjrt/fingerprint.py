"""What an executable is made of: the parts of its fingerprint, and what it is compiled for.

PJRT has no key of its own. The parts are everything that the compiler is given (program, options,
description of the devices), which build of the plug-in compiles, and what both read beside that:
flags in the environment and, on a CPU, its features. An accelerator's executable is not bound to
the features of its host's CPU: one that was compiled ahead of time elsewhere is found.
"""

import hashlib
import platform
import re
import sys
from dataclasses import dataclass
from typing import Final

from graphstash.hooks.environment import (
    EnvironmentStates,
    cpu_device_type,
    cpu_features,
    libc,
    version_of,
)
from graphstash.hooks.labels import function_label, user_line
from graphstash.hooks.pjrt.abi import (
    POINTER_BYTES,
    AheadOfTimeArgs,
    ClientCompileArgs,
    Function,
    Program,
)
from graphstash.hooks.pjrt.api import Api, PjrtError, view_of
from graphstash.hooks.pjrt.canonical import canonical
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash_schema import DeviceType

__all__ = [
    "TOPOLOGY_FUNCTIONS",
    "Fingerprints",
    "Topology",
    "is_portable",
    "label_of",
    "toolchain",
]

_CALLBACK: Final = re.compile(rb"python_(cpu|gpu)_callback")
"""Custom calls by which JAX calls back into Python, at the address of a function."""

_FUNCTION: Final = re.compile(rb"\b(jit|pmap)_[A-Za-z0-9_]{1,100}")
"""The name that JAX gives a module, in whichever form the program comes."""

_WHERE_TO_LOAD: Final = frozenset(
    f"env.{name}" for name in ("PJRT_DEVICE", "PJRT_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")
)
"""They choose the plug-in, which is a part of its own, wherever it lies."""

TOPOLOGY_FUNCTIONS: Final = (
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_NAME,
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_VERSION,
    Function.TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS,
    Function.TOPOLOGY_DESCRIPTION_SERIALIZE,
    Function.DEVICE_DESCRIPTION_KIND,
    Function.DEVICE_DESCRIPTION_PROCESS_INDEX,
)
"""What a plug-in needs to have so that its devices can be described."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A description of devices.

    Attributes:
        platform: e.g. `cpu`, `tpu`.
        version: of the platform, in the plug-in's words.
        digest: SHA-256 of the serialized description; it names the CPU's features, the chips and
            their arrangement. `none` where a plug-in has no description.
        kinds: of its devices, each once, e.g. `TPU v5 lite`.
        device_count: in all processes.
        process_count: that share the devices.
    """

    platform: str
    version: str
    digest: str
    kinds: tuple[str, ...]
    device_count: int
    process_count: int

    @classmethod
    def of_client(cls, api: Api, client: int) -> "Topology":
        """What a client runs on.

        Raises:
            PjrtError: the plug-in does not even name its platform.
        """
        if api.has(Function.CLIENT_TOPOLOGY_DESCRIPTION, *TOPOLOGY_FUNCTIONS):
            try:
                topology = api.ask(Function.CLIENT_TOPOLOGY_DESCRIPTION, client).answer
                return cls.of(api, topology)
            except PjrtError:  # not implemented for this kind of device
                pass
        return cls(
            platform=api.text(Function.CLIENT_PLATFORM_NAME, client),
            version=api.text(Function.CLIENT_PLATFORM_VERSION, client),
            digest="none",
            kinds=(),
            device_count=0,
            process_count=0,
        )

    @classmethod
    def of(cls, api: Api, topology: int) -> "Topology":
        """Reads a `PJRT_TopologyDescription`.

        Raises:
            PjrtError: the plug-in cannot describe it.
        """
        with api.serialized(Function.TOPOLOGY_DESCRIPTION_SERIALIZE, topology) as serialized:
            digest = hashlib.sha256(serialized).hexdigest()
        listed = api.ask(Function.TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS, topology)
        pointers = view_of(listed.answer, listed.size * POINTER_BYTES).cast("Q")
        kinds = {api.text(Function.DEVICE_DESCRIPTION_KIND, device) for device in pointers}
        processes = {
            api.ask(Function.DEVICE_DESCRIPTION_PROCESS_INDEX, device).answer for device in pointers
        }
        return cls(
            platform=api.text(Function.TOPOLOGY_DESCRIPTION_PLATFORM_NAME, topology),
            version=api.text(Function.TOPOLOGY_DESCRIPTION_PLATFORM_VERSION, topology),
            digest=digest,
            kinds=tuple(sorted(kinds)),
            device_count=len(pointers),
            process_count=len(processes),
        )

    @property
    def device_type(self) -> DeviceType:
        """The word for it; hosts of one device type run each other's executables."""
        if self.platform.lower() == "cpu":
            return cpu_device_type()
        kinds = "+".join(self.kinds)[:48]
        count = str(self.device_count)
        return DeviceType.of(self.platform[:32], kinds, count, self.digest[:16])


def is_portable(code: memoryview) -> bool:
    """Whether a program means the same in another process."""
    return _CALLBACK.search(code) is None


class Fingerprints:
    """Describes what one plug-in compiles.

    XLA parses its flags when the first client is created, and reads other variables later. All
    states of the environment from then on count.
    """

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._environment = EnvironmentStates(without=_WHERE_TO_LOAD)

    def observe_environment(self) -> None:
        """Note the environment's state: a client is about to be created."""
        self._environment.observe()

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
        self._environment.observe()
        options = bytes(view_of(args.options, args.options_size))
        api = self._plugin.api
        parts = {
            **self._environment.parts(),
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


def label_of(args: ClientCompileArgs | AheadOfTimeArgs) -> str:
    """The name of JAX's function that a program was made of; else the line that compiles it."""
    program = Program.from_address(args.program)
    found = _FUNCTION.search(view_of(program.code, program.code_size))
    return function_label(found[0].decode()) if found is not None else user_line()


def toolchain(plugin: Plugin) -> str:
    """Versions, for people and for retention."""
    frameworks = [
        f"{name} {sys.modules[name].__version__}"
        for name in ("torch_xla", "jax")
        if hasattr(sys.modules.get(name), "__version__")
    ]
    api = plugin.api
    return ", ".join([*frameworks, f"{plugin.path.name} (PJRT {api.major}.{api.minor})"])
