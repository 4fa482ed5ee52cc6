"""Call a function right after the first import of a module.

Every Python process under `graphstash run` imports this module, so it is small and imports only the
standard library.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["after_import", "before_first_package", "is_imported", "when_imported"]

_NO_COMPILERS: Final = sys.stdlib_module_names | {"sitecustomize", "usercustomize", "graphstash"}
"""Top-level modules that do not import a compiler."""


def is_imported(module: str) -> bool:
    """Return whether a module's execution has finished."""
    return module in sys.modules and not _is_being_imported(module)


def when_imported(
    module: str, action: Callable[[], None], *, on_begin: Callable[[], None] | None = None
) -> None:
    """Call `action` once after `module` has been executed. Log its exceptions.

    Args:
        module: top-level name of a module that is not imported yet, or is being imported.
        action: called without arguments.
        on_begin: called before the execution of the module; not if the execution has begun already.
    """
    if not _is_being_imported(module):
        sys.meta_path.insert(0, _Finder(module, action, on_begin))
    elif type(spec := sys.modules[module].__spec__) in (ModuleSpec, _ExecutingSpec):
        spec.__class__ = _ExecutingSpec
        spec.__dict__.setdefault("_actions", []).append(action)


def after_import(module: str, action: Callable[[], None]) -> None:
    """Call `action` now if `module` has been imported, otherwise like `when_imported`."""
    if is_imported(module):
        _run_logged(action)
    else:
        when_imported(module, action)


def before_first_package(action: Callable[[], None]) -> None:
    """Call `action` once before the next import of a module outside the standard library.

    Logs its exceptions. Never calls `action` in a process that imports no such module.
    """
    sys.meta_path.insert(0, _FirstPackage(action))


def _is_being_imported(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _run_logged(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # a hook's outermost frame: the import must succeed
        import logging  # here, because most processes do not need it

        logging.getLogger("graphstash").warning(
            "graphstash: cannot install the hook; continuing without it", exc_info=True
        )


class _ExecutingSpec(ModuleSpec):
    """Spec of a module during its execution, at the end of which Python sets `_initializing`."""

    @property
    def _initializing(self) -> bool:
        return True

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__class__ = ModuleSpec  # type: ignore[assignment] # its original class
        self._initializing = value
        for action in self.__dict__.pop("_actions"):
            if self.name in sys.modules:  # otherwise the import failed
                _run_logged(action)


class _FirstPackage:
    """Finder that calls the action, which may add finders, before others find the first package."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface of a finder
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in _NO_COMPILERS:
            return None
        if (action := self._action) is None:
            return None  # the action imports a package
        self._action = None
        _run_logged(action)  # under Python's import lock, so other threads wait
        with suppress(ValueError):
            sys.meta_path.remove(self)
        return importlib.util.find_spec(fullname)


class _Finder:
    """Finder of one module: uses the other finders, and wraps the loader that they return.

    It stays installed until the module has been executed, because libraries also call
    `importlib.util.find_spec` to check whether a compiler is installed.
    """

    def __init__(
        self, module: str, action: Callable[[], None], on_begin: Callable[[], None] | None
    ) -> None:
        self._module = module
        self._action = action
        self._on_begin = on_begin
        self._is_searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the interface of a finder
        target: ModuleType | None = None,  # noqa: ARG002 - likewise
    ) -> ModuleSpec | None:
        if fullname != self._module or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._finish, self._begin)  # type: ignore[assignment] # a stand-in
        return spec

    def _begin(self) -> None:
        if self._on_begin is not None:
            _run_logged(self._on_begin)

    def _finish(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)
        _run_logged(self._action)


class _Loader:
    """Wraps the module's loader until the module is executed."""

    def __init__(self, loader: Any, finish: Callable[[], None], begin: Callable[[], None]) -> None:
        self._loader = loader
        self._finish = finish
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._begin()
        self._loader.exec_module(module)
        self._finish()
