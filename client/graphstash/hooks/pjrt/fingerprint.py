"""The parts of an executable's fingerprint, and its device type.

PJRT has no key of its own. The parts cover the program, the options, the description of the
devices, the build of the plug-in, and flags in the environment. Parts of a CPU executable include
the CPU's features and the number of threads, for which XLA splits loops. Those of an accelerator's
executable do not, so that a job finds an executable that another host compiled ahead of time.
"""

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from graphstash.errors import CacheError, Reason
from graphstash.hooks.client_options import text_of
from graphstash.hooks.device_libraries import gpu_parts, toolkit
from graphstash.hooks.environment import (
    EnvironmentStates,
    cpu_device_type,
    cpu_features,
    libc,
    threads,
    version_of,
)
from graphstash.hooks.labels import function_label, user_line
from graphstash.hooks.named_files import option_files, toolkits_in
from graphstash.hooks.partitioners import Partitioners
from graphstash.hooks.pjrt.abi import (
    POINTER_BYTES,
    AheadOfTimeArgs,
    ClientCompileArgs,
    Function,
    Program,
)
from graphstash.hooks.pjrt.api import Api, PjrtError, view_of
from graphstash.hooks.pjrt.canonical import canonicalize
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash_schema import DeviceType

__all__ = [
    "TOPOLOGY_FUNCTIONS",
    "Fingerprints",
    "Topology",
    "digest_of",
    "is_portable",
    "label_of",
    "toolchain",
]

_CALLBACKS: Final = tuple(
    re.compile(name)  # separately: one pattern with alternatives is 15 times slower
    for name in (
        *(b"python_cpu_callback", b"python_gpu_callback"),
        *(b"CustomSPMDPartitioning", b"InspectSharding"),
    )
)
"""Custom calls that contain the address of a Python function in this process."""

_LATE: Final = (
    "programs with custom calls are not shared: the job may have registered how to partition "
    "them before graphstash.install(), which came after jax.devices()"
)

_UNKNOWN_OPTIONS: Final = (
    "a program is not shared: graphstash.install() came after its client, whose options are unknown"
)

_FUNCTION: Final = re.compile(rb"\b(jit|pmap)_[A-Za-z0-9_]{1,100}")
"""Module name by JAX; it is readable in every program format."""

_PLUGIN_SELECTORS: Final = frozenset(
    f"env.{name}" for name in ("PJRT_DEVICE", "PJRT_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")
)
"""Variables that only select the plug-in. A separate part identifies the plug-in by its build."""

TOPOLOGY_FUNCTIONS: Final = (
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_NAME,
    Function.TOPOLOGY_DESCRIPTION_PLATFORM_VERSION,
    Function.TOPOLOGY_DESCRIPTION_GET_DEVICE_DESCRIPTIONS,
    Function.TOPOLOGY_DESCRIPTION_SERIALIZE,
    Function.DEVICE_DESCRIPTION_KIND,
    Function.DEVICE_DESCRIPTION_PROCESS_INDEX,
)
"""Plug-in functions that `Topology.of` calls."""


def digest_of(description: bytes | memoryview) -> str:
    """Return the digest of a serialized topology, whose maps CUDA's plug-in writes in any order."""
    return hashlib.sha256(canonicalize(bytes(description))).hexdigest()


@dataclass(frozen=True, slots=True)
class Topology:
    """A description of devices.

    Attributes:
        platform: Name of the platform, e.g. `cpu` or `tpu`.
        version: Version of the platform, in the plug-in's format.
        digest: Digest of the serialized description: the CPU's features, or the chips and their
            arrangement. `none` if the plug-in has no description.
        kinds: Distinct kinds of devices, e.g. `TPU v5 lite`.
        device_count: Number of devices of all processes.
        process_count: Number of processes with devices.
    """

    platform: str
    version: str
    digest: str
    kinds: tuple[str, ...]
    device_count: int
    process_count: int

    @classmethod
    def of_client(cls, api: Api, client: int) -> "Topology":
        """Return a client's topology. Without a description, set only platform and version.

        Raises:
            PjrtError: The plug-in does not name its platform.
        """
        if api.has(Function.CLIENT_TOPOLOGY_DESCRIPTION, *TOPOLOGY_FUNCTIONS):
            try:
                topology = api.ask(Function.CLIENT_TOPOLOGY_DESCRIPTION, client).answer
                return cls.of(api, topology)
            except PjrtError:  # the plug-in cannot describe this kind of device
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
        """Read a `PJRT_TopologyDescription`.

        Raises:
            PjrtError: The plug-in cannot serialize or describe it.
        """
        with api.serialized(Function.TOPOLOGY_DESCRIPTION_SERIALIZE, topology) as serialized:
            digest = digest_of(serialized)
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
        """The device type. Hosts of one device type can run each other's executables."""
        if self.platform.lower() == "cpu":
            return cpu_device_type()
        kinds = "+".join(self.kinds)[:48]
        count = str(self.device_count)
        return DeviceType.of(self.platform[:32], kinds, count, self.digest[:16])


def is_portable(code: memoryview) -> bool:
    """Return whether other processes can run a program, because it calls no Python function."""
    return not any(name.search(code) for name in _CALLBACKS)


class Fingerprints:
    """Computes the parts for programs that one plug-in compiles.

    XLA parses its flags when a framework creates the first client, and reads other variables later.
    Therefore the parts cover the environment at every client creation and compilation so far.

    Args:
        plugin: The plug-in.
        partitioners: Returns the partitioners that JAX has registered, or None without JAX.
        late_options: Returns the options of a client that started before the hook, or None if they
            are unknown.
    """

    def __init__(
        self,
        plugin: Plugin,
        *,
        partitioners: Callable[[], Partitioners | None] = lambda: None,
        late_options: Callable[[], Mapping[str, object] | None] = lambda: None,
    ) -> None:
        self._plugin = plugin
        self._partitioners = partitioners
        self._late_options = late_options
        self._environment = EnvironmentStates(without=_PLUGIN_SELECTORS)
        self._clients: dict[int, tuple[str, str]] = {}

    def observe_environment(self) -> str:
        """Record the environment. Return the number of threads for which a client would compile.

        Call it right before the framework creates a client.
        """
        self._environment.observe()
        return threads()

    def add_client(
        self, client: int, number_of_threads: str, options: Mapping[str, object]
    ) -> None:
        """Record the number of threads for which a new client compiles, and its options."""
        self._clients[client] = number_of_threads, text_of(options)

    def parts(
        self, args: ClientCompileArgs | AheadOfTimeArgs, topology: Topology
    ) -> dict[str, str] | None:
        """Return the parts of a program's key, or None if other processes cannot run it.

        Raises:
            CacheError: How the devices share the program, or the client's options, may be unknown.
            OSError: The plug-in's file cannot be read.
        """
        program = Program.from_address(args.program)
        code = view_of(program.code, program.code_size)
        partitioners = self._partitioners()
        if not is_portable(code) or (partitioners and partitioners.is_in_python(code)):
            return None
        is_unknown = partitioners and partitioners.is_late and topology.device_count > 1
        if is_unknown and b"custom_call" in bytes(code):
            raise CacheError(Reason.UNSHAREABLE, _LATE)
        self._environment.observe()
        options = bytes(view_of(args.options, args.options_size))
        api = self._plugin.api
        parts = {
            **self._environment.parts(),
            **option_files(options),
            "format": bytes(view_of(program.format, program.format_size)).decode("ascii"),
            "program": hashlib.sha256(code).hexdigest(),
            "options": hashlib.sha256(canonicalize(options)).hexdigest(),
            "platform": topology.platform,
            "platform_version": topology.version,
            "topology": topology.digest,
            "plugin": self._plugin.identity,
            "api": f"{api.major}.{api.minor}",
            "machine": platform.machine(),
        }
        number_of_threads, client_options = self._describe_client(args.client)
        if client_options:
            parts["client_options"] = client_options
        if partitioners and (by_rows := partitioners.names_by_rows(code)):
            parts["partitioned_by_rows"] = by_rows
        if topology.platform.lower() == "cpu":
            parts |= {"libc": libc(), "cpu_features": " ".join(cpu_features())}
            parts["threads"] = number_of_threads
        if topology.platform.lower() in {"cuda", "rocm"}:
            parts |= {**gpu_parts(), "toolkit": toolkit(toolkits_in(options))}
        if topology.platform.lower() == "neuron":  # the plug-in calls a separate compiler
            parts["compiler"] = version_of("neuronx-cc") or "none"
        return parts

    def _describe_client(self, client: int | None) -> tuple[str, str]:
        if not client:  # compiled ahead of time
            return threads(), ""
        known = self._clients.get(client)
        if known is None:
            options = self._late_options()
            if options is None:
                raise CacheError(Reason.UNSHAREABLE, _UNKNOWN_OPTIONS)
            known = threads(), text_of(options)
        return known


def label_of(args: ClientCompileArgs | AheadOfTimeArgs) -> str:
    """Return the name of the compiled JAX function, or else the line of user code on the stack."""
    program = Program.from_address(args.program)
    found = _FUNCTION.search(view_of(program.code, program.code_size))
    return function_label(found[0].decode()) if found is not None else user_line()


def toolchain(plugin: Plugin) -> str:
    """Return the versions of the frameworks and of the plug-in, for display and retention rules."""
    frameworks = [
        f"{name} {sys.modules[name].__version__}"
        for name in ("torch_xla", "jax")
        if hasattr(sys.modules.get(name), "__version__")
    ]
    api = plugin.api
    return ", ".join([*frameworks, f"{plugin.path.name} (PJRT {api.major}.{api.minor})"])
