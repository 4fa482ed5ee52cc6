"""C++ objects that g++ builds from the source code that Inductor generates for CPUs.

torch's caches store the source code without the object. Without this module, a process that finds
all its graphs still runs g++ for every kernel. In torch 2.7 to 2.15, only `CppBuilder.build` runs
g++.

The key of an object contains the command, in which the contents of each named file replace its
path. It also contains the releases of the compiler, torch, Python and libc, because the headers
that they install are not hashed. It contains the CPU, because the command has `-march=native`.
"""

import logging
import os
import re
import shlex
import sysconfig
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
from torch._inductor import config
from torch._inductor.runtime.runtime_utils import (  # type: ignore[attr-defined] # re-exported
    cache_dir,
    default_cache_dir,
)

from graphstash._compile.cache import CompileCache
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash._replacing import replacing
from graphstash.errors import LocalTierError
from graphstash.hooks.inductor.fingerprint import host_parts, request_of
from graphstash_schema import ArtifactKind

__all__ = ["LateHeader", "Objects", "defer_precompilation", "object_parts"]

_log = logging.getLogger("graphstash")

_READ_BY_GCC: Final = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "SOURCE_DATE_EPOCH",
    "LD_RUN_PATH",
    "GNUTARGET",
    "LDEMULATION",
    "CCC_OVERRIDE_OPTIONS",
)
"""Environment variables that change what g++, its linker or clang read and write for the same
command (gcc's manual, "Environment Variables Affecting GCC"; ld's manual, "Environment
Variables")."""


_QUOTES: Final = re.compile(r"['\"\\]")
_WORD: Final = re.compile(r"[^ \t\r\n]+")

_LABEL: Final = "C++ kernel"


class LateHeader(str):
    """An empty path for a header that is not precompiled yet, so that torch uses none.

    Since 2.8, Inductor preprocesses a header, to name it by its content, and precompiles it before
    it builds the C++ objects. If all objects are fetched, both steps are wasted, and they are the
    largest cost of a warm process. `prepare` therefore runs when the first object is built. Without
    a precompiled header, g++ compiles the included header, which takes longer and gives an equal
    object.

    The builder's options carry this path to the thread that builds.
    """

    __slots__ = ("prepare",)
    prepare: Callable[[], str]


def defer_precompilation(original: Callable[..., str]) -> Callable[..., str]:
    """Return a replacement for `codecache._precompile_header` that defers the work."""

    def precompile_header(*args: Any, **kwargs: Any) -> str:
        header = LateHeader()
        header.prepare = lambda: original(*args, **kwargs)
        return header

    return precompile_header


def _add_header(builder: Any) -> None:
    """Precompile the header of a builder, and add it to the command. Never raises."""
    header = getattr(builder._build_option, "precompiled_header", None)
    if not isinstance(header, LateHeader):
        return
    try:
        path = header.prepare()
    except Exception:  # noqa: BLE001 - the hook's outermost frame: build without it
        _log.debug("precompiling a header failed", exc_info=True)
        return
    # The builder's constructor does the same with a path that is not empty.
    builder._include_dirs_args = f"-include {path} {builder._include_dirs_args}"


class Objects:
    """Takes the place of `CppBuilder.build`.

    Attributes:
        built_seconds: seconds spent so far on building objects that are shared.

    Args:
        cache: cache of the objects.
        original: `CppBuilder.build` of torch.
        is_awaited: returns whether this process compiles a graph that other processes may wait for.
            If so, it takes no lease for an object, because those processes wait for the graph.
    """

    def __init__(
        self, cache: CompileCache, original: Callable[[Any], Any], *, is_awaited: Callable[[], bool]
    ) -> None:
        self._original = original
        self._is_awaited = is_awaited
        self.built_seconds = 0.0
        self.switch_cache(cache)

    def switch_cache(self, cache: CompileCache) -> None:
        """Switch to the cache of a forked child."""
        self._cache = cache
        self._exchange = TwoCallCache(cache)

    def close(self) -> None:
        """Release the leases of unfinished builds."""
        self._exchange.close()

    def build(self, builder: Any) -> Any:
        """Fetch the object to the builder's path, or let torch build it."""
        target = Path(builder.get_target_file_path())
        found = self._find(builder, target)
        if found is True:
            return None
        _add_header(builder)
        if not found:
            return self._original(builder)
        started = monotonic()
        try:
            result = self._original(builder)
            seconds = monotonic() - started
            self.built_seconds += seconds
        except BaseException:
            self._exchange.end()
            raise
        self._publish(found, target, seconds)
        return result

    def _find(self, builder: Any, target: Path) -> CompileRequest | bool:
        """Return True if the object was fetched to `target`. Return the request to publish it with
        if the cache lacks it, and False if it is not shared or could not be looked up.
        """
        try:
            if config.force_disable_caches or not _is_shared(builder):
                return False
            parts = object_parts(builder.get_command_line(), target)
            request = request_of(ArtifactKind.INDUCTOR, parts, label=_LABEL)
            payload = self._exchange.get(request, lease=not self._is_awaited())
            if payload is None:
                return request
            _write(target, payload)
        except OSError as error:
            self._cache.record_fallback(LocalTierError(str(error)))
            return False
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: torch builds it
            self._cache.record_fallback(error)
            return False
        return True

    def _publish(self, request: CompileRequest, target: Path, seconds: float) -> None:
        try:
            self._exchange.put(request, target.read_bytes(), compile_seconds=seconds)
        except OSError as error:
            self._exchange.end()
            self._cache.record_fallback(LocalTierError(str(error)))


def object_parts(command: str, target: Path) -> dict[str, str]:
    """Return the parts of the key for what a g++ command line writes to `target`."""
    compiler, *words = _split_command(command)
    places = _host_directories()
    described = (_describe_word(word, target, places) for word in words)
    return {
        **host_parts(),
        "command": " ".join([Path(compiler).name, *described]),
        # The name of a precompiled header is a hash of all text that it includes. It must be in the
        # key, because g++ uses a precompiled header even if an included file has changed.
        "header": target.name if target.suffix in {".gch", ".pch"} else "",
        "environment": " ".join(f"{name}={os.environ.get(name, '')}" for name in _READ_BY_GCC),
    }


def _split_command(command: str) -> list[str]:
    """Split a command line like `shlex.split`, which is slow, if it has no quotes."""
    return shlex.split(command) if _QUOTES.search(command) else _WORD.findall(command)


def _describe_word(word: str, target: Path, places: list[tuple[str, str]]) -> str:
    """Return a word of the command without directories of this host, or the hash of a file."""
    if word == str(target):
        return f"<target>{target.suffix}"
    path = Path(word)
    if path.is_absolute() and path.is_file():
        content = path.read_bytes()
        for place, name in places:
            content = content.replace(place.encode(), name.encode())
        return sha256(content).hexdigest()
    if "rpath" in word:  # g++ writes the path into the object
        return word
    for place, name in places:
        word = word.replace(place, name)
    return word


def _host_directories() -> list[tuple[str, str]]:
    """Return directories that differ between hosts, with their placeholders, longest first.

    Before 2.8, the source code includes a header from Inductor's directory by its absolute path.
    The file name of that header is a hash of its content.
    """
    inductor = dict.fromkeys((default_cache_dir(), cache_dir()), "<cache>")
    return sorted({**inductor, **_fixed_directories()}.items(), key=lambda place: -len(place[0]))


@cache
def _fixed_directories() -> Mapping[str, str]:
    paths = sysconfig.get_paths()
    return {
        str(Path(torch.__file__).parent): "<torch>",
        paths["include"]: "<include>",
        paths["platlib"]: "<platlib>",
        paths["stdlib"]: "<stdlib>",
        sysconfig.get_config_var("LIBDIR") or paths["data"]: "<libdir>",
    }


def _is_shared(builder: Any) -> bool:
    """Return whether to share the object with other jobs.

    Do not share preprocessed text: torch only hashes it, to detect a changed header on this host.
    Do not share an ahead-of-time export, because it is the job's product.
    """
    unshared = ("_preprocessing", "_aot_mode", "_use_relative_path")
    return not any(getattr(builder, name, False) for name in unshared)


def _write(target: Path, payload: bytes) -> None:
    """Write a file atomically, because torch checks only that the file exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, is_text=False, mode=0o755, is_durable=False) as file:
        file.write(payload)
