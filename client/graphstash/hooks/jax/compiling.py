"""Track the program that each thread compiles, and detect the end of the compilation.

JAX passes only a key to its cache. The caller of the cache, `compile_or_get_cached` in
`jax._src.compiler`, has the backend, decides whether to write the result, and handles a failed
compilation. This module wraps that function, and no other module uses its arguments. In JAX 0.4.31
to 0.10.2 they are `backend`, `computation`, `devices`, `compile_options`, `host_callbacks`, ...

The module also wraps `_cache_write`. In a job of several processes, JAX lets only the first process
write, but another process may compile for all of them.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from jax._src import cache_key, compilation_cache, compiler, distributed, xla_bridge
from jaxlib import xla_client

from graphstash._compile.request import CompileRequest
from graphstash.hooks.client_options import options_by_jax, text_of
from graphstash.hooks.environment import EnvironmentStates, threads, threads_of_running_client
from graphstash.hooks.jax.smallness import is_small
from graphstash.hooks.partitioners import Partitioners
from graphstash.hooks.patching import Patches
from graphstash_schema import ArtifactKey

__all__ = ["Program", "ProgramTracker"]

_log = logging.getLogger("graphstash")

_FUNCTION = "compile_or_get_cached"
_WRITE = "_cache_write"
_SERIALIZE = "_serialize_ir"
_START_BACKEND = "_init_backend"
_NATIVE, _CREATE_CLIENT = "_xla", "get_c_api_client"

_CALLS_BACK = "it calls back into Python"

_UNKNOWN_OPTIONS = "its client's options are unknown, because graphstash.install() came later"

_PARTITIONED = "Python code partitions it"

_UNSHAREABLE = {
    # XLA calls the user's functions during the compilation, and JAX identifies them by address.
    b"CustomSPMDPartitioning": f"{_PARTITIONED} (custom_partitioning)",
    b"InspectSharding": "Python code looks at its shardings (inspect_array_sharding)",
    # Before JAX 0.6, callbacks on CPUs and GPUs are addresses.
    b"python_cpu_callback": _CALLS_BACK,
    b"python_gpu_callback": _CALLS_BACK,
}
"""Reasons not to share a program, by the custom call that runs code of this process only."""


@dataclass(slots=True)
class Program:
    """One program that JAX compiles or looks up.

    Attributes:
        platform: `cpu`, `gpu`, `tpu`, ...
        devices: All devices of the backend.
        device: One of the devices on which the program will run.
        placement: Array of the devices on which the program will run, or None if the hook cannot
            watch the compilation.
        computation: The MLIR module, or None if the hook cannot watch the compilation.
        options: XLA's compile options, or None if the hook cannot watch the compilation.
        is_watched: Whether the hook detects the end of the compilation.
        is_compile_only: Whether this host can neither run nor load the program.
        is_alone: Whether the program runs only in this process, and JAX lets this process write.
        is_collective: Whether the program runs on devices of several processes, all of which
            compile it and can write the result.
        unshareable: Why the key cannot describe the program, or an empty string.
        environment: Key part for earlier states of the environment variables, if they changed.
        threads: Number of the CPU client's threads.
        client_options: Options of a plug-in's client.
        partitioned_by_rows: Custom calls that XLA partitions by rows, because this process has
            registered them for that.
        is_small: Whether the program likely compiles fast and runs in one process.
        missed: JAX's keys that were looked up and not found.
        packed: Keys in `missed` whose result belongs in a pack.
        given: Artifact keys of the entries that JAX received, by JAX's key.
    """

    platform: str
    devices: tuple[Any, ...]
    device: Any
    placement: Any = None
    computation: Any = None
    options: Any = None
    is_watched: bool = True
    is_compile_only: bool = False
    is_alone: bool = True
    is_collective: bool = False
    unshareable: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    threads: str = ""
    client_options: str = ""
    partitioned_by_rows: str = ""
    is_small: bool = False
    missed: set[str] = field(default_factory=set)
    packed: set[str] = field(default_factory=set)
    given: dict[str, ArtifactKey] = field(default_factory=dict)
    requests: dict[str, CompileRequest] = field(default_factory=dict)


class ProgramTracker:
    """Tracks the program that each thread compiles.

    Args:
        on_end: Called in a thread whose compiler has returned or failed.
        wants: Returns whether this process must write the result of a collective program.
        record_fallback: Called with the error that prevented such a write.
    """

    def __init__(
        self,
        on_end: Callable[[], None],
        wants: Callable[[str, Program], bool],
        record_fallback: Callable[[Exception], None],
    ) -> None:
        self._on_end = on_end
        self._wants = wants
        self._record_fallback = record_fallback
        self._local = threading.local()
        self._environment = EnvironmentStates()
        self._threads = ""
        self._options: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by client
        self._observing = threading.Lock()  # guards `_environment` and `_threads`
        self._patches = Patches()
        self._partitioners = Partitioners(xla_client, xla_bridge)
        wrappers = [
            (xla_bridge, _START_BACKEND, self._wrap_start_backend),
            (getattr(xla_client, _NATIVE), _CREATE_CLIENT, self._wrap_create_client),
            (compiler, _FUNCTION, self._wrap_compile),
            (compiler, _WRITE, self._wrap_write),
            (cache_key, _SERIALIZE, self._wrap_serialize),  # 0.4.31 to 0.10.2
        ]
        with self._patches.all_or_none():
            for module, name, wrapper in wrappers:
                if hasattr(module, name):
                    self._patches.wrap(module, name, wrapper)
            self._partitioners.observe(self._patches)

    def close(self) -> None:
        """Remove the wrappers."""
        self._patches.undo()

    def current_program(self) -> Program:
        """Return the program that this thread compiles. If the hook cannot watch this version of
        JAX, return a program for the default backend.
        """
        program: Program | None = getattr(self._local, "program", None)
        if program is not None:
            return program
        backend = xla_bridge.get_backend()  # does not start one: a compilation is running
        program = _make_program(backend, tuple(backend.local_devices()), (), is_watched=False)
        self._record_environment()
        program.threads = self._threads
        self._describe_client(program)
        return program

    def record_environment(self, program: Program) -> None:
        """Record the environment again, for a program whose compilation has ended."""
        program.environment = self._record_environment()

    def _wrap_start_backend(self, start_backend: Callable[..., Any]) -> Callable[..., Any]:
        """Record the environment first: XLA and libtpu parse their flags when a client starts."""

        @functools.wraps(start_backend)
        def init_backend(*arguments: Any, **named: Any) -> Any:
            if "cpu" in (*arguments, *named.values()):
                self._threads = threads()
            self._record_environment()
            return start_backend(*arguments, **named)

        return init_backend

    def _wrap_create_client(self, create_client: Callable[..., Any]) -> Callable[..., Any]:
        """Record the options of each plug-in's client."""

        @functools.wraps(create_client)
        def get_c_api_client(*arguments: Any, **named: Any) -> Any:
            client = create_client(*arguments, **named)
            with suppress(Exception):  # the hook's outermost frame: they count as unknown
                options = arguments[1] if len(arguments) > 1 else named.get("options", {})
                self._options[client] = text_of(options)
            return client

        return get_c_api_client

    def _describe_client(self, program: Program) -> None:
        """Add the options of a program's client, which may have started before the hook."""
        if program.is_compile_only:
            return
        try:
            program.client_options = self._options_of(program.device.client)
        except Exception as error:  # noqa: BLE001 - an outermost frame of the hook: JAX compiles
            program.unshareable = program.unshareable or f"{_UNKNOWN_OPTIONS}: {error!r}"

    def _options_of(self, client: Any) -> str:
        if client not in self._options:
            backends = xla_bridge._backends.items()
            names = [name for name, each in backends if each is client and name != "cpu"]
            options = options_by_jax(xla_bridge, names[0]) if names else {}
            if options is None:
                raise LookupError(f"the client of {names[0]} was made by another function")
            self._options[client] = text_of(options)
        return self._options[client]

    def _record_environment(self) -> dict[str, str]:
        """Record the state of the environment. Return the key part for earlier states, if any."""
        with self._observing:
            self._environment.observe()
            self._threads = self._threads or threads_of_running_client()
            name = "environment_before"
            return {key: value for key, value in self._environment.parts().items() if key == name}

    def _wrap_compile(self, compile_program: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(compile_program)

        @functools.wraps(compile_program)
        def compile_or_get_cached(*arguments: Any, **named: Any) -> Any:
            before = getattr(self._local, "program", None)
            self._local.program = program = _program_of_call(signature, arguments, named)
            if program is not None:
                program.environment = self._record_environment()
                program.threads = self._threads
                self._describe_client(program)
            try:
                return compile_program(*arguments, **named)
            finally:
                self._local.program = before
                if before is None:  # else an outer compilation still needs what this thread began
                    with suppress(Exception):  # the hook's outermost frame: JAX has its result
                        self._on_end()

        return compile_or_get_cached

    def _wrap_serialize(self, serialize: Callable[..., bytes]) -> Callable[..., bytes]:
        """Search the serialized program for unshareable calls. Visiting operations is slower."""

        @functools.wraps(serialize)
        def serialize_ir(*arguments: Any, **named: Any) -> bytes:
            serialized = serialize(*arguments, **named)
            program: Program | None = getattr(self._local, "program", None)
            if program is not None:
                if self._partitioners.is_in_python(serialized):
                    program.unshareable = _PARTITIONED
                for name, why in _UNSHAREABLE.items():
                    if name in serialized:
                        program.unshareable = why
                if program.placement is not None and program.placement.size > 1:
                    program.partitioned_by_rows = self._partitioners.names_by_rows(serialized)
                    if self._partitioners.is_late and b"custom_call" in serialized:
                        program.unshareable = program.unshareable or self._why_partitioning_unknown(
                            program
                        )
            return serialized

        return serialize_ir

    def _why_partitioning_unknown(self, program: Program) -> str:
        """Return why the key may lack how XLA partitions a program, or an empty string."""
        try:
            name = self._partitioners.first_unknown(_find_custom_calls(program.computation))
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            return f"its custom calls cannot be listed ({error!r})"
        return name and (
            f"a program may have registered how to partition {name} before graphstash.install(), "
            "which came after jax.devices()"
        )

    def _wrap_write(self, write: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(write)

        @functools.wraps(write)
        def cache_write(*arguments: Any, **named: Any) -> None:
            program: Program | None = getattr(self._local, "program", None)
            if program is None or not program.is_collective:
                write(*arguments, **named)
                return
            try:
                bound = signature.bind(*arguments, **named).arguments
                if program.unshareable or not self._wants(bound["cache_key"], program):
                    return
                compilation_cache.put_executable_and_time(
                    bound["cache_key"],
                    bound["module_name"],
                    bound["executable"],
                    bound["backend"],
                    int(bound["compile_time_secs"]),
                )
            except Exception as error:  # noqa: BLE001 - a hook's outermost frame: there is a result
                self._record_fallback(error)

        return cache_write


def _find_custom_calls(module: Any) -> list[str]:
    """Return the names of a module's custom calls."""
    found: list[str] = []

    def visit(operations: Any) -> None:
        for each in operations:
            if each.operation.name == "stablehlo.custom_call":
                found.append(each.operation.attributes["call_target_name"].value)
            for region in each.operation.regions:
                for block in region.blocks:
                    visit(block.operations)

    visit(module.body.operations)
    return sorted(found)


def _program_of_call(
    signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Program | None:
    try:
        bound = signature.bind(*arguments, **named).arguments
        program = _make_program(
            bound["backend"], tuple(bound["devices"].flat), bound["host_callbacks"]
        )
        program.placement = bound["devices"]
        program.computation = bound["computation"]
        program.options = bound.get("compile_options")
        program.is_small = not program.is_collective and is_small(bound["computation"])
    except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
        _log.debug("graphstash: a program of jax is not understood: %r", error)
        return None
    return program


def _make_program(
    backend: Any, devices: tuple[Any, ...], host_callbacks: Any, *, is_watched: bool = True
) -> Program:
    spans_processes = len({device.process_index for device in devices}) > 1
    return Program(
        platform=str(backend.platform),
        devices=tuple(backend.devices()),
        device=devices[0],
        is_watched=is_watched,
        is_compile_only=type(backend).__name__.startswith("CompileOnly"),
        is_alone=distributed.global_state.process_id == 0 and not spans_processes,
        is_collective=spans_processes and hasattr(compiler, _WRITE),
        unshareable=_CALLS_BACK if host_callbacks else "",
    )
