"""The torch_xla hook: fills torch_xla's persistent cache right before a compile, empties it after.

torch_xla <= 2.7 keeps compiled graphs in a directory, one file per graph. This process gets a
private one (two processes in one directory read each other's half-written files), and either

    exact   catches torch_xla's look-up of the file itself: whatever way a step ran (lazy `sync`,
            `torch_xla.compile`, `torch.compile(backend="openxla")`, `.item()`), exactly the
            artifact that would be compiled is fetched first; x86-64 Linux
    hint    predicts the files from the pending graph before a step; works everywhere, costs a few
            steps until the loop has settled

torch_xla 2.8 and 2.9 write such files but cannot load them; there the pjrt hook serves plug-ins.

Nothing runs in a step whose graph torch_xla has in memory.
"""

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch_xla
import torch_xla.runtime as xr

from graphstash._compile.cache import CompileCache
from graphstash.hooks.patching import Patches
from graphstash.hooks.torch_xla.exact import ExactMode
from graphstash.hooks.torch_xla.fingerprint import Fingerprints
from graphstash.hooks.torch_xla.gate import GateUnavailable
from graphstash.hooks.torch_xla.hint import HintMode
from graphstash.hooks.torch_xla.omitted import omitted_attributes
from graphstash.hooks.versions import is_supported

__all__ = ["TorchXlaHook", "install"]

_log = logging.getLogger("graphstash")

_CANNOT_LOAD: Final = ("2.8", "2.9")
"""Their runtime answers UNIMPLEMENTED when an executable is loaded (pytorch/xla#9094)."""

_BUILT_IN: Final = "CPU"
"""The device whose runtime is inside torch_xla; all others are plug-ins: the pjrt hook's."""

_PATH_VARIABLE: Final = "XLA_PERSISTENT_CACHE_PATH"
_READ_ONLY_VARIABLE: Final = "XLA_PERSISTENT_CACHE_READ_ONLY"


def install(cache: CompileCache) -> "TorchXlaHook | None":
    """Puts the cache into torch_xla; must come before the first computation.

    Returns:
        The hook, or None when it was not installed; a warning says why.
    """
    version = str(torch_xla.__version__)
    if version.startswith(_CANNOT_LOAD):
        _tell_what_is_shared(version, by_plugin="pjrt" in cache.config.hooks)
        return None
    if not is_supported("torch_xla", version):
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
    if _has_pending_operations():
        _log.warning(
            "graphstash: torch_xla has already recorded operations, whose attributes are unknown, "
            "so its graphs are not shared; call graphstash.install() before the first operation"
        )
        return None
    return TorchXlaHook(cache)


def _has_pending_operations() -> bool:
    """Whether a graph is under way in any thread; its operations were not observed."""
    extension = torch_xla._XLAC
    return extension._xla_runtime_is_initialized() and any(
        extension._check_device_tensor_need_materialization("")  # on any device
    )


def _tell_what_is_shared(version: str, *, by_plugin: bool) -> None:
    """Warns where torch_xla's own cache cannot load and no other hook stands in for it."""
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
    """Owns the private cache directory and the mode that serves it."""

    def __init__(self, cache: CompileCache) -> None:
        self._make_directory()
        # torch_xla keeps the name for the rest of the process, and a forked child inherits it. As a
        # descriptor it can be made to mean the child's own directory there.
        self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        self._known_as = Path(f"/proc/self/fd/{self._descriptor}")
        _claim(self._known_as)
        self._patches = Patches()
        self._patches.replace(xr, "initialize_cache", _already_initialized)
        self._fingerprints = Fingerprints()
        for name in ("putenv", "unsetenv"):  # `os.environ` calls them
            self._patches.wrap(os, name, self._observe_before)
        self._mode = self._open(cache)

    def close(self) -> None:
        """Publishes what is finished and takes the hook out.

        torch_xla keeps the private directory until the process ends: it cannot be given another.
        """
        self._mode.close()
        self._patches.undo()

    def after_fork(self, cache: CompileCache) -> bool:
        """Continues in a child that can still start the runtime; others compile by themselves."""
        if torch_xla._XLAC._xla_runtime_is_initialized():
            return False
        self._make_directory()
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)
        self._mode.after_fork(cache, self._directory)
        return True

    def _observe_before(self, change: Callable[..., None]) -> Callable[..., None]:
        """Notes the environment as it is before a change: torch_xla may have read it by then."""

        def changing(*args: Any) -> None:
            try:
                self._fingerprints.observe_environment()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                _log.debug("a state of the environment was not observed: %r", error)
            change(*args)

        return changing

    def _open(self, cache: CompileCache) -> ExactMode | HintMode:
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
        self._directory = Path(tempfile.mkdtemp(prefix="graphstash-torch_xla-"))
        # Whatever ends the process with an exit leaves no files; a kill leaves them to the system.
        atexit.register(self._remove_directory)

    def _remove_directory(self) -> None:
        if self._owner == os.getpid():
            shutil.rmtree(self._directory, ignore_errors=True)


def _claim(directory: Path) -> None:
    """Makes `directory` the persistent cache of this process, and of this process alone.

    torch_xla takes the directory from the environment when its cache is made. That is brought
    about here, and the environment is put back, so that no child process shares the directory.
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


def _already_initialized(path: str, readonly: bool = False) -> None:  # noqa: FBT001, FBT002
    """Replaces `xr.initialize_cache`, which would fail the job with an assertion."""
    del readonly
    _log.warning("graphstash: initialize_cache(%r) is not needed and has no effect", path)
