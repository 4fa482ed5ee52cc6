"""Calls a function right after a module has been imported for the first time.

Standard library only, and cheap: every Python process under `graphstash run` passes through it.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_log = logging.getLogger("graphstash")


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Calls `action` once, when `module` has been executed; its exceptions are logged, not raised.

    Args:
        module: top-level name of a module that has not been imported yet.
        action: what to do.
    """
    sys.meta_path.insert(0, _Finder(module, action))


class _Finder(MetaPathFinder):
    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module = module
        self._action = action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface of a finder
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)  # once; it also keeps the next line from coming back here
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(Loader):
    """Stands in for the real loader until the module has been executed."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            self._action()
        except Exception:  # noqa: BLE001 - a hook's outermost frame: the import must succeed
            _log.warning("graphstash: installing the hook failed; going on without", exc_info=True)
