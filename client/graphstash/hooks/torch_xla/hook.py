"""The torch_xla hook: puts artifacts into torch_xla's persistent cache before torch_xla compiles.

torch_xla <= 2.7 stores each compiled graph in a file of a directory. Each process gets a private
directory, because two processes would read each other's half-written files. The hook has two modes:

    exact   intercepts torch_xla's look-up of a file and fetches exactly the artifact that torch_xla
            would compile. Covers lazy `sync`, `torch_xla.compile`,
            `torch.compile(backend="openxla")` and `.item()`. Requires x86-64 Linux.
    hint    predicts the files from the pending graph before a step. Works on every platform, but
            delays the first few steps of a loop.

torch_xla 2.8 and newer write such files but cannot load them, so this hook is not installed there.
The pjrt hook serves them on devices that are PJRT plug-ins. Neither mode looks up a graph that
torch_xla has in memory.
"""

import atexit
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch_xla
import torch_xla.runtime as xr

from graphstash._compile.cache import CompileCache
from graphstash._held_folder import hold, remove_abandoned
from graphstash.hooks.patching import Patches
from graphstash.hooks.torch_xla import SPEC
from graphstash.hooks.torch_xla.exact import ExactMode
from graphstash.hooks.torch_xla.fingerprint import Fingerprints
from graphstash.hooks.torch_xla.gate import GateUnavailable
from graphstash.hooks.torch_xla.hint import HintMode
from graphstash.hooks.torch_xla.omitted import omitted_attributes

__all__ = ["TorchXlaHook", "install"]

_log = logging.getLogger("graphstash")

_CANNOT_LOAD: Final = ("2.8", "2.9")
"""Versions whose runtime returns UNIMPLEMENTED for loading an executable (pytorch/xla#9094)."""

_BUILT_IN: Final = "CPU"
"""Device whose runtime is part of torch_xla. Other devices are plug-ins, see the pjrt hook."""

_PREFIX: Final = "graphstash-of-torch_xla-"
"""Earlier releases used another prefix, and did not lock their directories."""

_PATH_VARIABLE: Final = "XLA_PERSISTENT_CACHE_PATH"
_READ_ONLY_VARIABLE: Final = "XLA_PERSISTENT_CACHE_READ_ONLY"


def install(cache: CompileCache) -> "TorchXlaHook | None":
    """Install the cache in torch_xla. Call it before the first operation on a device.

    Returns None if torch_xla cannot use the cache, and warns unless the pjrt hook serves instead.
    """
    version = str(torch_xla.__version__)
    if version.startswith(_CANNOT_LOAD):
        _warn_of_useless_cache(version, by_plugin=cache.config.wants_hook("pjrt"))
        return None
    if not SPEC.is_supported(version):
        return None
    if torch_xla._XLAC._xla_computation_cache_is_initialized():
        _log.warning(
            "graphstash: torch_xla has already run a computation, so its cache cannot be "
            "replaced; call graphstash.install() before the first computation"
        )
        return None
    try:
        omitted_attributes()
    except GateUnavailable as error:
        _log.warning(
            "graphstash: graphs of torch_xla are not shared, because attributes that it leaves out "
            "of their names cannot be observed: %s",
            error,
        )
        return None
    if torch_xla._XLAC._xla_runtime_is_initialized():
        _log.warning(
            "graphstash: torch_xla's runtime has already started, with operations and threads that "
            "are unknown, so its graphs are not shared; call graphstash.install() before"
        )
        return None
    return TorchXlaHook(cache)


def _warn_of_useless_cache(version: str, *, by_plugin: bool) -> None:
    """Warn that torch_xla cannot load from its own cache, unless the pjrt hook replaces it."""
    device = str(xr.device_type())
    if device == _BUILT_IN:
        _log.warning(
            "graphstash: torch_xla %s cannot load a compiled graph back on its built-in runtime "
            "(pytorch/xla#9094), so with PJRT_DEVICE=%s it compiles as usual; use torch_xla 2.7",
            version,
            device,
        )
    elif not by_plugin:
        _log.warning(
            "graphstash: torch_xla %s cannot load a compiled graph from its own cache "
            "(pytorch/xla#9094), so it compiles as usual; add pjrt to GRAPHSTASH_HOOKS to share "
            "what is compiled for PJRT_DEVICE=%s",
            version,
            device,
        )


class TorchXlaHook:
    """The installed hook: owns the private cache directory and the mode that serves it."""

    def __init__(self, cache: CompileCache) -> None:
        self._make_directory()
        # torch_xla never changes the path, and a forked child inherits it. The path names a
        # descriptor, which the child can redirect to its own directory.
        self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        self._known_as = Path(f"/proc/self/fd/{self._descriptor}")
        _set_directory(self._known_as)
        self._patches = Patches()
        self._fingerprints = Fingerprints()
        with self._patches.all_or_none():
            self._patches.replace(xr, "initialize_cache", _ignore_initialize_cache)
            for name in ("putenv", "unsetenv"):  # `os.environ` calls these functions
                self._patches.wrap(os, name, self._observe_before)
            self._patches.wrap(torch, "set_flush_denormal", self._observe_after)
            self._mode = self._start_mode(cache)

    def close(self) -> None:
        """Publish the finished graphs and remove the hook. torch_xla still uses the directory."""
        self._mode.close()
        self._patches.undo()

    def after_fork(self, cache: CompileCache) -> bool:
        """Continue in a forked child. False if the parent has started the runtime: no cache."""
        if torch_xla._XLAC._xla_runtime_is_initialized():
            return False
        self._make_directory()
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)
        self._mode.after_fork(cache, self._directory)
        return True

    def _observe_before(self, change: Callable[..., None]) -> Callable[..., None]:
        """Observe the environment before each change: torch_xla may have read the old state."""

        def record_and_change(*args: Any) -> None:
            try:
                self._fingerprints.before_change()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                _log.debug("a state of the environment was not observed: %r", error)
            change(*args)

        return record_and_change

    def _observe_after(self, change: Callable[[bool], bool]) -> Callable[[bool], bool]:
        @functools.wraps(change)
        def change_and_observe(mode: bool) -> bool:
            is_supported = change(mode)
            self._fingerprints.observe_denormals()
            return is_supported

        return change_and_observe

    def _start_mode(self, cache: CompileCache) -> ExactMode | HintMode:
        if cache.config.torch_xla_mode != "hint":
            try:
                return ExactMode(
                    cache,
                    self._directory,
                    self._fingerprints,
                    known_as=self._known_as,
                    library=Path(torch_xla._XLAC.__file__),
                )
            except (GateUnavailable, OSError) as error:
                level = logging.INFO if cache.config.torch_xla_mode == "auto" else logging.WARNING
                _log.log(level, "graphstash: torch_xla's look-ups are predicted: %s", error)
        return HintMode(cache, self._directory, self._fingerprints)

    def _make_directory(self) -> None:
        self._owner = os.getpid()
        remove_abandoned(_PREFIX)
        self._held = Path(tempfile.mkdtemp(prefix=_PREFIX))
        hold(self._held)  # until the process ends
        self._directory = self._held / "graphs"
        self._directory.mkdir()
        atexit.register(self._remove_directory)

    def _remove_directory(self) -> None:
        if self._owner == os.getpid():
            shutil.rmtree(self._held, ignore_errors=True)


def _set_directory(directory: Path) -> None:
    """Make `directory` the persistent cache of this process only.

    torch_xla creates its cache in the directory that the environment names. Restores the
    environment afterwards, so that no child process inherits the directory.
    """
    before = {name: os.environ.get(name) for name in (_PATH_VARIABLE, _READ_ONLY_VARIABLE)}
    if before[_PATH_VARIABLE]:
        _log.warning(
            "graphstash: %s=%s is not used in this process; the torch_xla hook replaces it",
            _PATH_VARIABLE,
            before[_PATH_VARIABLE],
        )
    xr.initialize_cache(str(directory), readonly=False)
    torch_xla._XLAC._xla_get_num_cached_compilation_graph()
    for name, value in before.items():
        with suppress(KeyError):
            del os.environ[name]
        if value is not None:
            os.environ[name] = value


def _ignore_initialize_cache(path: str, readonly: bool = False) -> None:
    """Replace `xr.initialize_cache`, whose assertion would fail in a job that calls it again."""
    del readonly
    _log.warning("graphstash: initialize_cache(%r) is not needed and has no effect", path)
