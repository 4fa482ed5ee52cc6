"""Seam: the places in JAX into which the hook is put, and JAX's settings meanwhile.

JAX's persistent cache is an object that `jax._src.compilation_cache.get_file_cache(path)` makes
when a program is compiled for the first time (0.4.25 to 0.12.0).
"""

import functools
import inspect
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
from jax._src import cache_key, compilation_cache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from graphstash.hooks.jax.compiling import Compiling, Program
from graphstash.hooks.jax.entries import Keeper, packer
from graphstash.hooks.patching import Patches

__all__ = ["Seam", "SeamUnavailableError"]

_log = logging.getLogger("graphstash")

_COMPRESSION: Final = "graphstash"
"""Stands in JAX's key for its compressor, of which nothing is left in what is stored."""

_ACCELERATORS: Final = "_hash_accelerator_config"
"""The part of JAX's key that describes the devices."""

_DIRECTORY: Final = "/nonexistent/graphstash"
"""A name: nothing is ever written there."""

_CHECK: Final = "jax_compilation_cache_check_contents"  # since 0.10
_PATH: Final = "jax_compilation_cache_dir"
_XLA_CACHES: Final = "jax_persistent_cache_enable_xla_caches"

_DEFAULTS: Final = {
    _PATH: None,
    _XLA_CACHES: "xla_gpu_per_fusion_autotune_cache_dir",
    "jax_persistent_cache_min_compile_time_secs": 1.0,
}
"""As JAX ships them; what differs was set by the user."""

_WANTED: Final[dict[str, Any]] = {
    # Without a directory JAX has no persistent cache. Nothing is written there; the name is the
    # same everywhere, because it can enter the key (0.4.36 to 0.10).
    _PATH: _DIRECTORY,
    # XLA's autotuning files would be kept in that directory, and its name would enter the key.
    _XLA_CACHES: "none",
    # Every lease that is taken has to end with an artifact. What compiles in no time takes none,
    # and costs no request of its own: see `Packs`.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # Its limit of an entry's size stays: JAX's own is 0, and JAX replaces any other global value
    # when a program is compiled where a context manager says 0.
}


class SeamUnavailableError(Exception):
    """This JAX lacks the internals that the hook needs."""


class Seam:
    """Everything that was changed in JAX; `close` puts it back.

    Args:
        keeper: serves JAX's look-ups.
        named: called with every key that JAX makes; what it raises ends that compile.

    Raises:
        SeamUnavailableError: nothing was changed.
    """

    def __init__(
        self, keeper: Keeper, *, named: Callable[[str, Program], None] | None = None
    ) -> None:
        self._keeper = keeper
        self._named = named
        self._is_open = True
        self._told = False
        try:
            self._pack = packer()
        except (AttributeError, ValueError) as error:
            raise SeamUnavailableError(f"its entries cannot be read: {error}") from error
        self._cache = _cache_object(self.get, self.put)
        self._checked_cache = _cache_object(self.get, self._put_checked)
        self._settings = _Settings()
        self._compiling = Compiling(keeper.ended, self._wants, keeper.record_fallback)
        self._patches = Patches()
        if hasattr(cache_key, _ACCELERATORS):
            self._patches.wrap(cache_key, _ACCELERATORS, _hash_accelerators)
        self._patches.wrap(compilation_cache, "get_file_cache", self._serve)
        if hasattr(cache_key, "get"):
            self._patches.wrap(cache_key, "get", self._name)
        reset_cache()  # JAX may have opened its own cache already

    def close(self) -> None:
        """Puts everything back."""
        self._is_open = False
        self._patches.undo()
        self._compiling.close()
        self._settings.close()
        reset_cache()

    def get(self, jax_key: str) -> bytes | None:
        """A look-up of JAX."""
        try:
            return self._keeper.get(jax_key, self._compiling.present(), self._pack)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._keeper.record_fallback(error)
            return None

    def put(self, jax_key: str, entry: bytes) -> None:
        """A result of JAX."""
        try:
            self._keeper.put(jax_key, self._compiling.present(), entry)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._keeper.record_fallback(error)

    def _put_checked(self, jax_key: str, entry: bytes) -> None:
        """A result that JAX has compared with what `get` gave it, if anything."""
        if jax_key not in self._compiling.present().given:
            self.put(jax_key, entry)

    def _wants(self, jax_key: str, program: Program) -> bool:
        try:
            return self._is_open and self._keeper.wants(jax_key, program)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: JAX compiles
            self._keeper.record_fallback(error)
            return False

    def _serve(self, get_file_cache: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_file_cache)
        def ours(path: str) -> Any:
            if not self._is_open:
                return get_file_cache(path)
            if str(path) != _DIRECTORY and not self._told:
                self._told = True
                _log.warning(
                    "graphstash: nothing is written to jax_compilation_cache_dir=%s while "
                    "the jax hook is installed",
                    path,
                )
            if getattr(jax.config, _CHECK, False):
                return compilation_cache.VerificationCache(self._checked_cache), path
            return self._cache, path

        return ours

    def _name(self, name_program: Callable[..., str]) -> Callable[..., str]:
        signature = inspect.signature(name_program)

        @functools.wraps(name_program)
        def ours(*arguments: Any, **named: Any) -> str:
            if not self._is_open:
                return name_program(*arguments, **named)
            told = signature.bind(*arguments, **named)
            if "compression_algorithm" in signature.parameters:
                told.arguments["compression_algorithm"] = _COMPRESSION
            jax_key = name_program(*told.args, **told.kwargs)
            if self._named is not None:
                self._named(jax_key, self._compiling.present())
            return jax_key

        return ours


def _hash_accelerators(hash_accelerators: Callable[..., None]) -> Callable[..., None]:
    """Gives a program that runs on the CPUs of several processes one name in all of them.

    A CPU's topology begins with the process that asks, so JAX names the program differently in each
    (0.4.31 to 0.10.2). The CPU's features are in our fingerprint.
    """

    @functools.wraps(hash_accelerators)
    def ours(hash_obj: Any, accelerators: Any, *rest: Any) -> None:
        devices = list(accelerators.flat)
        processes = {device.process_index for device in devices}
        if len(processes) == 1 or devices[0].platform != "cpu":
            hash_accelerators(hash_obj, accelerators, *rest)
            return
        for device in devices:
            described = f"{device.id} {device.process_index} {device.device_kind};"
            hash_obj.update(described.encode())

    return ours


def _cache_object(get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> Any:
    """What JAX uses as its cache."""
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
    """Sets what the user has set neither in the environment nor in `jax.config`, until `close`.

    All of this is about the values that hold for all threads: those of a context manager, in which
    the hook may be installed or removed, take precedence, and end with it.
    """

    def __init__(self) -> None:
        self._before = _values(name for name in _WANTED if hasattr(jax.config, name))
        keep = {name for name, value in self._before.items() if _is_users(name, value)}
        if _PATH not in keep:
            keep.discard(_XLA_CACHES)  # without a directory of the user's it has no effect
        for name in keep:
            del self._before[name]
        for name in self._before:
            _update(name, _WANTED[name])

    def close(self) -> None:
        """Puts back what has not been changed since."""
        for name, value in _values(self._before).items():
            if value == _WANTED[name]:
                _update(name, self._before[name])


def _values(names: Iterable[str]) -> dict[str, Any]:
    """Settings of JAX as a new thread sees them: without any context manager of this one."""
    values: dict[str, Any] = {}

    def read() -> None:
        values.update({name: getattr(jax.config, name) for name in names})

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return values


def _is_users(name: str, value: object) -> bool:
    return name.upper() in os.environ or value != _DEFAULTS[name]


def _update(name: str, value: object) -> None:
    jax.config.update(name, value)
