"""What a thread compiles at the moment, and the moment when it is done with it.

JAX's cache sees a key and nothing else. For which backend the key is, whether the result will be
written, and that a compile has failed, is known one frame further up, in
`jax._src.compiler.compile_or_get_cached` (0.4.31 to 0.10.2: `backend`, `computation`, `devices`,
`compile_options`, `host_callbacks`, ...). So that function is wrapped, and this module is the only
one that knows its arguments. So is `_cache_write` beside it: in a job of several processes JAX lets
only the first one write, but it may be another one that compiles for all.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jax._src import cache_key, compilation_cache, compiler, distributed, xla_bridge

from graphstash._compile.request import CompileRequest
from graphstash.hooks.environment import EnvironmentStates
from graphstash.hooks.jax.smallness import is_small
from graphstash.hooks.patching import Patches
from graphstash_schema import ArtifactKey

__all__ = ["Compiling", "Program"]

_log = logging.getLogger("graphstash")

_FUNCTION = "compile_or_get_cached"
_WRITE = "_cache_write"
_SERIALIZE = "_serialize_ir"
_START_BACKEND = "_init_backend"

_CALLS_BACK = "it calls back into Python"

_UNSHAREABLE = {
    # XLA calls the user's functions while it compiles, and JAX names them by their addresses.
    b"CustomSPMDPartitioning": "Python code partitions it (custom_partitioning)",
    b"InspectSharding": "Python code looks at its shardings (inspect_array_sharding)",
    # Before JAX 0.6, callbacks on CPUs and GPUs are addresses, too.
    b"python_cpu_callback": _CALLS_BACK,
    b"python_gpu_callback": _CALLS_BACK,
}
"""Names of custom calls behind which another process has other code, and why that is so."""


@dataclass(slots=True)
class Program:
    """One program on its way through JAX's compiler.

    Attributes:
        platform: `cpu`, `gpu`, `tpu`, ...
        computation: the MLIR module; None where the hook cannot watch.
        options: XLA's compile options; None likewise.
        devices: all devices of its backend.
        device: one on which it is going to run.
        is_watched: whether the hook sees when the compiler is done with it.
        is_compile_only: there is nothing here that could run it, or load it.
        is_alone: no other process of the job compiles it at the same time.
        is_collective: it runs on devices of several processes; all of them compile it, and each of
            them can write.
        unshareable: why no key covers it; empty when one does.
        environment: parts for variables that have changed since the backend was created.
        is_small: it looks as if it compiles in no time, and no other process has to run the same.
        missed: JAX's keys that were asked for and not found.
        packed: those of them whose result belongs into a pack.
        given: JAX's keys that were found.
        requests: what was looked up, by JAX's keys.
    """

    platform: str
    devices: tuple[Any, ...]
    device: Any
    computation: Any = None
    options: Any = None
    is_watched: bool = True
    is_compile_only: bool = False
    is_alone: bool = True
    is_collective: bool = False
    unshareable: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    is_small: bool = False
    missed: set[str] = field(default_factory=set)
    packed: set[str] = field(default_factory=set)
    given: dict[str, ArtifactKey] = field(default_factory=dict)
    requests: dict[str, CompileRequest] = field(default_factory=dict)


class Compiling:
    """Knows the present program of every thread.

    Args:
        ended: called in the thread whose compiler has returned or failed.
        wants: whether a result of a program that spans processes is to be written by this one.
        record_fallback: told why such a result could not be written.
    """

    def __init__(
        self,
        ended: Callable[[], None],
        wants: Callable[[str, Program], bool],
        record_fallback: Callable[[Exception], None],
    ) -> None:
        self._ended = ended
        self._wants = wants
        self._record_fallback = record_fallback
        self._local = threading.local()
        self._environment = EnvironmentStates()
        self._observing = threading.Lock()  # guards the states
        self._patches = Patches()
        if hasattr(xla_bridge, _START_BACKEND):
            self._patches.wrap(xla_bridge, _START_BACKEND, self._wrap_start)
        if hasattr(compiler, _FUNCTION):
            self._patches.wrap(compiler, _FUNCTION, self._wrap)
        if hasattr(compiler, _WRITE):
            self._patches.wrap(compiler, _WRITE, self._wrap_write)
        if hasattr(cache_key, _SERIALIZE):  # 0.4.31 to 0.10.2
            self._patches.wrap(cache_key, _SERIALIZE, self._wrap_serialize)

    def close(self) -> None:
        """Takes the wrappers off."""
        self._patches.undo()

    def present(self) -> Program:
        """What this thread compiles.

        Where JAX does not let itself be watched, a program for its default backend.
        """
        program: Program | None = getattr(self._local, "program", None)
        if program is not None:
            return program
        backend = xla_bridge.get_backend()  # a compile is under way, so there are backends
        return _program(backend, tuple(backend.local_devices()), (), is_watched=False)

    def _wrap_start(self, start_backend: Callable[..., Any]) -> Callable[..., Any]:
        """Observes the environment: XLA and libtpu parse their flags when a client is created."""

        @functools.wraps(start_backend)
        def init_backend(*arguments: Any, **named: Any) -> Any:
            self._observe()
            return start_backend(*arguments, **named)

        return init_backend

    def _observe(self) -> dict[str, str]:
        """Add the present state of the environment; return a part for the states before it."""
        with self._observing:
            self._environment.observe()
            name = "environment_before"
            return {key: value for key, value in self._environment.parts().items() if key == name}

    def _wrap(self, compile_program: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(compile_program)

        @functools.wraps(compile_program)
        def compile_or_get_cached(*arguments: Any, **named: Any) -> Any:
            before = getattr(self._local, "program", None)
            self._local.program = program = _read(signature, arguments, named)
            if program is not None:
                program.environment = self._observe()
            try:
                return compile_program(*arguments, **named)
            finally:
                self._local.program = before
                if before is None:  # else another one is under way, which has begun things too
                    with suppress(Exception):  # a hook's outermost frame: there is a result
                        self._ended()

        return compile_or_get_cached

    def _wrap_serialize(self, serialize: Callable[..., bytes]) -> Callable[..., bytes]:
        """Reads the program's bytes, which JAX hashes: to visit every operation takes longer."""

        @functools.wraps(serialize)
        def serialize_ir(*arguments: Any, **named: Any) -> bytes:
            serialized = serialize(*arguments, **named)
            program: Program | None = getattr(self._local, "program", None)
            if program is not None:
                for name, why in _UNSHAREABLE.items():
                    if name in serialized:
                        program.unshareable = why
            return serialized

        return serialize_ir

    def _wrap_write(self, write: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(write)

        @functools.wraps(write)
        def cache_write(*arguments: Any, **named: Any) -> None:
            program: Program | None = getattr(self._local, "program", None)
            if program is None or not program.is_collective:
                write(*arguments, **named)
                return
            try:
                told = signature.bind(*arguments, **named).arguments
                if program.unshareable or not self._wants(told["cache_key"], program):
                    return
                compilation_cache.put_executable_and_time(
                    told["cache_key"],
                    told["module_name"],
                    told["executable"],
                    told["backend"],
                    int(told["compile_time_secs"]),
                )
            except Exception as error:  # noqa: BLE001 - a hook's outermost frame: there is a result
                self._record_fallback(error)

        return cache_write


def _read(
    signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> Program | None:
    try:
        told = signature.bind(*arguments, **named).arguments
        program = _program(told["backend"], tuple(told["devices"].flat), told["host_callbacks"])
        program.computation = told["computation"]
        program.options = told.get("compile_options")
        program.is_small = not program.is_collective and is_small(told["computation"])
    except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
        _log.debug("graphstash: a program of jax is not understood: %r", error)
        return None
    return program


def _program(
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
