"""Seam: patches JAX to use the hook as its persistent cache, and changes JAX's settings meanwhile.

When JAX (0.4.25 to 0.12.0) compiles its first program, it creates its persistent cache with
`jax._src.compilation_cache.get_file_cache(path)`. The seam returns its own object instead.
"""

import copy
import functools
import inspect
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final

import jax
from jax._src import cache_key, compilation_cache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from graphstash.hooks.jax.compiling import Program, ProgramTracker
from graphstash.hooks.jax.entries import EntryStore, make_compressor
from graphstash.hooks.patching import Patches

__all__ = ["Seam", "SeamUnavailableError"]

_log = logging.getLogger("graphstash")

_COMPRESSION: Final = "graphstash"
"""Replaces the name of JAX's compressor in the key, because it does not compress artifacts."""

_ACCELERATORS: Final = "_hash_accelerator_config"
"""Name of JAX's function that hashes the devices into the key."""

_DIRECTORY: Final = "/nonexistent/graphstash"
"""A directory name for JAX. Nothing is written to it."""

_CHECK: Final = "jax_compilation_cache_check_contents"  # since 0.10
_PATH: Final = "jax_compilation_cache_dir"
_XLA_CACHES: Final = "jax_persistent_cache_enable_xla_caches"

_OWN_CACHES: Final = ("xla_gpu_kernel_cache_file", "xla_gpu_per_fusion_autotune_cache_dir")

_DEFAULTS: Final = {
    _PATH: None,
    _XLA_CACHES: "xla_gpu_per_fusion_autotune_cache_dir",
    "jax_persistent_cache_min_compile_time_secs": 1.0,
}
"""JAX's default values. A value that differs counts as set by the user."""

_CHANGED: Final[dict[str, Any]] = {
    # Without a directory, JAX has no persistent cache. All processes use the same name, because
    # JAX 0.4.36 to 0.10 can include the name in the key.
    _PATH: _DIRECTORY,
    # Otherwise XLA would write autotuning files to that directory, and JAX would include its name
    # in the key.
    _XLA_CACHES: "none",
    # JAX must pass every result to `put`, because other jobs wait for the artifact of a granted
    # lease. Programs that compile fast take no lease: see `Packs`.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # Leave jax_persistent_cache_min_entry_size_bytes at its default of 0. JAX overwrites any other
    # global value if a context manager sets 0 while JAX creates the cache.
}


class SeamUnavailableError(Exception):
    """This version of JAX lacks internals that the hook needs."""


class Seam:
    """Owns all changes to JAX, and reverts them in `close`.

    Args:
        store: Serves JAX's look-ups and stores its results.
        on_key: Called with every key that JAX computes. Its exceptions abort the compilation.

    Raises:
        SeamUnavailableError: This version of JAX is not supported. JAX is unchanged.
    """

    def __init__(
        self, store: EntryStore, *, on_key: Callable[[str, Program], None] | None = None
    ) -> None:
        self._store = store
        self._on_key = on_key
        self._is_open = True
        self._has_warned = False
        try:
            self._compress = make_compressor()
        except (AttributeError, ValueError) as error:
            raise SeamUnavailableError(f"its entries cannot be read: {error}") from error
        self._cache = _make_cache(self.get, self.put)
        self._checked_cache = _make_cache(self.get, self._put_checked)
        with ExitStack() as undo:
            undo.callback(_Settings().close)
            self._tracker = ProgramTracker(
                store.end_compilation, self._wants, store.record_fallback
            )
            undo.callback(self._tracker.close)
            patches = Patches()
            undo.callback(patches.undo)
            if hasattr(cache_key, _ACCELERATORS):
                patches.wrap(cache_key, _ACCELERATORS, _wrap_hash_accelerators)
            patches.wrap(compilation_cache, "get_file_cache", self._wrap_get_file_cache)
            if hasattr(cache_key, "get"):
                patches.wrap(cache_key, "get", self._wrap_get_key)
            reset_cache()  # JAX may have created its own cache already
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Restore JAX's functions, settings and cache."""
        self._is_open = False
        self._undo.close()
        reset_cache()

    def get(self, jax_key: str) -> bytes | None:
        """Return the entry for JAX, or None to make JAX compile. Never raises."""
        try:
            return self._store.get(jax_key, self._tracker.current_program(), self._compress)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._store.record_fallback(error)
            return None

    def put(self, jax_key: str, entry: bytes) -> None:
        """Store an entry that JAX has compiled. Never raises."""
        try:
            program = self._tracker.current_program()
            self._tracker.record_environment(program)
            self._store.put(jax_key, program, entry)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._store.record_fallback(error)

    def _put_checked(self, jax_key: str, entry: bytes) -> None:
        """Store an entry, unless JAX compiled it only to compare it with the entry from `get`."""
        if jax_key not in self._tracker.current_program().given:
            self.put(jax_key, entry)

    def _wants(self, jax_key: str, program: Program) -> bool:
        try:
            return self._is_open and self._store.wants(jax_key, program)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._store.record_fallback(error)
            return False

    def _wrap_get_file_cache(self, get_file_cache: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_file_cache)
        def wrapper(path: str) -> Any:
            if not self._is_open:
                return get_file_cache(path)
            if str(path) != _DIRECTORY and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "graphstash: nothing is written to jax_compilation_cache_dir=%s while "
                    "the jax hook is installed",
                    path,
                )
            if getattr(jax.config, _CHECK, False):
                return compilation_cache.VerificationCache(self._checked_cache), path
            return self._cache, path

        return wrapper

    def _wrap_get_key(self, name_program: Callable[..., str]) -> Callable[..., str]:
        signature = inspect.signature(name_program)

        @functools.wraps(name_program)
        def wrapper(*arguments: Any, **keywords: Any) -> str:
            if not self._is_open:
                return name_program(*arguments, **keywords)
            bound = signature.bind(*arguments, **keywords)
            if "compression_algorithm" in signature.parameters:
                bound.arguments["compression_algorithm"] = _COMPRESSION
            if (options := bound.arguments.get("compile_options")) is not None:
                bound.arguments["compile_options"] = _without_own_caches(options)
            jax_key = name_program(*bound.args, **bound.kwargs)
            if self._on_key is not None:
                self._on_key(jax_key, self._tracker.current_program())
            return jax_key

        return wrapper


def _without_own_caches(options: Any) -> Any:
    """Return compile options that do not name the caches of XLA itself.

    JAX 0.4.36 to 0.10.2 includes their paths in the key, if the user sets a directory. Without
    these files, XLA measures or compiles the same again, see `named_files.is_output`.
    """
    try:
        debug_options = options.executable_build_options.debug_options
        named = [name for name in _OWN_CACHES if getattr(debug_options, name, "")]
        if not named:
            return options
        copied = copy.deepcopy(options)
        for name in named:
            setattr(copied.executable_build_options.debug_options, name, "")
    except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX's key has the names
        _log.debug("the names of XLA's caches stay in the key: %r", error)
        return options
    return copied


def _wrap_hash_accelerators(hash_accelerators: Callable[..., None]) -> Callable[..., None]:
    """Give all processes of a CPU job the same key.

    JAX 0.4.31 to 0.10.2 hashes the CPU topology, which begins with the process that requests it. So
    its key differs in each process. The fingerprint contains the CPU's features instead.
    """

    @functools.wraps(hash_accelerators)
    def wrapper(hash_obj: Any, accelerators: Any, *rest: Any) -> None:
        devices = list(accelerators.flat)
        processes = {device.process_index for device in devices}
        if len(processes) == 1 or devices[0].platform != "cpu":
            hash_accelerators(hash_obj, accelerators, *rest)
            return
        for device in devices:
            described = f"{device.id} {device.process_index} {device.device_kind};"
            hash_obj.update(described.encode())

    return wrapper


def _make_cache(get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> Any:
    """Return a persistent cache for JAX that calls `get` and `put`."""
    try:
        from jax._src.compilation_cache_interface import CacheInterface
    except ImportError as error:
        raise SeamUnavailableError(f"it has no CacheInterface: {error}") from error
    if not hasattr(compilation_cache, "get_file_cache"):
        raise SeamUnavailableError("it has no get_file_cache")

    class Cache(CacheInterface):
        _path = pathlib.Path(_DIRECTORY)  # JAX logs it

        def get(self, key: str) -> bytes | None:
            return get(key)

        def put(self, key: str, value: bytes) -> None:
            put(key, value)

    return Cache()


class _Settings:
    """Changes JAX's global settings until `close`, except those that the user has set.

    The user sets them in the environment or in `jax.config`. In a thread with an active context
    manager of `jax`, the context's value takes precedence over the global value.
    """

    def __init__(self) -> None:
        self._before = _global_values(name for name in _CHANGED if hasattr(jax.config, name))
        keep = {name for name, value in self._before.items() if _is_set_by_user(name, value)}
        if _PATH not in keep:
            keep.discard(_XLA_CACHES)  # it has no effect unless the user has set a directory
        for name in keep:
            del self._before[name]
        for name in self._before:
            _update(name, _CHANGED[name])

    def close(self) -> None:
        """Restore the settings that the user has not changed since."""
        for name, value in _global_values(self._before).items():
            if value == _CHANGED[name]:
                _update(name, self._before[name])


def _global_values(names: Iterable[str]) -> dict[str, Any]:
    """Return global values. Read them in a new thread, which has no active context manager."""
    values: dict[str, Any] = {}

    def read() -> None:
        values.update({name: getattr(jax.config, name) for name in names})

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return values


def _is_set_by_user(name: str, value: object) -> bool:
    return name.upper() in os.environ or value != _DEFAULTS[name]


def _update(name: str, value: object) -> None:
    jax.config.update(name, value)
