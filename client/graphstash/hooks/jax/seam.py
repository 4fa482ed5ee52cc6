"""Seam: the places in JAX into which the hook is put.

JAX's persistent cache is an object that `jax._src.compilation_cache.get_file_cache(path)` makes
when a program is compiled for the first time (0.4.25 to 0.12.0). Where that name is gone, the
public way is taken: a path class for `etils.epath`, in `paths`.
"""

import functools
import inspect
import logging
import pathlib
from collections.abc import Callable
from typing import Any, Final

from jax._src import cache_key, compilation_cache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from graphstash.hooks.jax.compiling import Compiling, Program
from graphstash.hooks.jax.entries import Keeper
from graphstash.hooks.jax.payload import packer
from graphstash.hooks.jax.replaced import Replaced
from graphstash.hooks.jax.settings import DIRECTORY, Settings

__all__ = ["Seam", "SeamUnavailableError"]

_log = logging.getLogger("graphstash")

_COMPRESSION: Final = "graphstash"
"""Stands in JAX's key for its compressor, of which nothing is left in what is stored."""


_ACCELERATORS: Final = "_hash_accelerator_config"
"""The part of JAX's key that describes the devices."""


class SeamUnavailableError(Exception):
    """This JAX has no place for the hook."""


class Seam:
    """Everything that was changed in JAX; `close` puts it back.

    Args:
        keeper: is asked from now on.
        named: hears every key that JAX makes; what it raises ends that compile.

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
        if self._cache is not None:
            self._settings = Settings()
        else:
            self._settings = Settings(_public_directory(self.get, self.put), insist=True)
        self._compiling = Compiling(keeper.ended, self._wants, keeper.trouble)
        self._replaced: list[Replaced] = []
        if hasattr(cache_key, _ACCELERATORS):
            self._replaced.append(Replaced(cache_key, _ACCELERATORS, _hash_accelerators))
        if self._cache is not None:
            self._replaced.append(Replaced(compilation_cache, "get_file_cache", self._serve))
        if hasattr(cache_key, "get"):
            self._replaced.append(Replaced(cache_key, "get", self._name))
        reset_cache()  # JAX may have made up its mind already

    def close(self) -> None:
        """Puts everything back."""
        self._is_open = False
        for replaced in self._replaced:
            replaced.undo()
        self._compiling.close()
        self._settings.close()
        reset_cache()

    def get(self, jax_key: str) -> bytes | None:
        """A look-up of JAX."""
        try:
            return self._keeper.get(jax_key, self._compiling.present(), self._pack)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._keeper.trouble(error)
            return None

    def put(self, jax_key: str, entry: bytes) -> None:
        """A result of JAX."""
        try:
            self._keeper.put(jax_key, self._compiling.present(), entry)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._keeper.trouble(error)

    def _wants(self, jax_key: str, program: Program) -> bool:
        try:
            return self._is_open and self._keeper.wants(jax_key, program)
        except Exception as error:  # noqa: BLE001 - a hook's outermost frame: training goes on
            self._keeper.trouble(error)
            return False

    def _serve(self, get_file_cache: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(get_file_cache)
        def ours(path: str) -> Any:
            if not self._is_open:
                return get_file_cache(path)
            if str(path) != DIRECTORY and not self._told:
                self._told = True
                _log.warning(
                    "graphstash: jax_compilation_cache_dir=%s gets no compiled programs while "
                    "graphstash keeps them",
                    path,
                )
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


def _cache_object(
    get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]
) -> object | None:
    """What JAX uses as its cache; None where it does not let itself be given one."""
    if not hasattr(compilation_cache, "get_file_cache"):
        return None
    try:
        from jax._src.compilation_cache_interface import CacheInterface
    except ImportError:
        return None

    class Cache(CacheInterface):
        _path = pathlib.Path(DIRECTORY)  # JAX logs it

        def get(self, key: str) -> bytes | None:
            return get(key)

        def put(self, key: str, value: bytes) -> None:
            put(key, value)

    return Cache()


def _public_directory(get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> str:
    # Imported where it is needed: JAX can do without the package that it needs.
    try:
        from graphstash.hooks.jax import paths

        return paths.register(get, put)
    except ImportError as error:
        raise SeamUnavailableError(
            "it has no get_file_cache any more, and the public way needs `pip install etils[epath]`"
        ) from error
