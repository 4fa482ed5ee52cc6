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

from jax._src import compilation_cache, compiler, distributed, xla_bridge

from graphstash._compile.request import CompileRequest
from graphstash.hooks.jax.smallness import is_small
from graphstash.hooks.patching import Patches
from graphstash_schema import ArtifactKey

__all__ = ["Compiling", "Program"]

_log = logging.getLogger("graphstash")

_FUNCTION = "compile_or_get_cached"
_WRITE = "_cache_write"


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
        is_unshareable: it calls back into this process.
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
    is_unshareable: bool = False
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
        self._patches = Patches()
        if hasattr(compiler, _FUNCTION):
            self._patches.wrap(compiler, _FUNCTION, self._wrap)
        if hasattr(compiler, _WRITE):
            self._patches.wrap(compiler, _WRITE, self._wrap_write)

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

    def _wrap(self, compile_program: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(compile_program)

        @functools.wraps(compile_program)
        def compile_or_get_cached(*arguments: Any, **named: Any) -> Any:
            before = getattr(self._local, "program", None)
            self._local.program = _read(signature, arguments, named)
            try:
                return compile_program(*arguments, **named)
            finally:
                self._local.program = before
                if before is None:  # else another one is under way, which has begun things too
                    with suppress(Exception):  # a hook's outermost frame: there is a result
                        self._ended()

        return compile_or_get_cached

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
                if program.is_unshareable or not self._wants(told["cache_key"], program):
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
        is_unshareable=bool(host_callbacks),
    )
