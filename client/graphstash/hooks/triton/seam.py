"""Where Triton takes its cache manager from, and what is called to compile a kernel.

Both are changed inside this process. Triton's variables would do as well, but child processes would
inherit them, with or without a graphstash to import.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Protocol

import triton
from triton.runtime import cache as triton_cache

from graphstash.hooks.triton.kernels import Kernels

__all__ = [
    "MANAGER_VARIABLE",
    "ManagerSeam",
    "chosen_manager",
    "is_ours",
    "manager_seam",
    "watch_compile",
]

MANAGER_VARIABLE: Final = "TRITON_CACHE_MANAGER"
_BACKEND_VARIABLE: Final = "TRITON_REMOTE_CACHE_BACKEND"
_OURS: Final = "graphstash.hooks.triton"
_REMOTE: Final = "triton.runtime.cache:RemoteCacheManager"
_GLOBAL: Final = "__cache_cls"


class ManagerSeam(Protocol):
    """The place of the class of Triton's cache manager."""

    def get(self) -> type | None:
        """The class that a program has put there; None for Triton's default."""

    def set(self, manager: type | None) -> None:
        """Puts a class there; None for Triton's default."""


class _Knob:
    """3.4 and newer. A class is not propagated to the environment as other knobs are."""

    def get(self) -> type | None:
        value: type | None = vars(triton.knobs.cache).get("manager_class")
        return value

    def set(self, manager: type | None) -> None:
        if manager is None:
            vars(triton.knobs.cache).pop("manager_class", None)
        else:
            triton.knobs.cache.manager_class = manager


class _Global:
    """Before 3.4: a global of Triton's module, where the variable's class is put, too."""

    def get(self) -> type | None:
        value: type = vars(triton_cache)[_GLOBAL]
        return None if value is triton_cache.FileCacheManager else value

    def set(self, manager: type | None) -> None:
        vars(triton_cache)[_GLOBAL] = manager or triton_cache.FileCacheManager


def manager_seam() -> ManagerSeam | None:
    """The seam of this Triton; None when it has neither."""
    # In the class: to read the knob itself would import whatever the user has named.
    if "manager_class" in vars(type(getattr(getattr(triton, "knobs", None), "cache", None))):
        return _Knob()
    return _Global() if _GLOBAL in vars(triton_cache) else None


def chosen_manager(seam: ManagerSeam) -> str:
    """The manager that the user has chosen, as `module:class`; empty for Triton's default.

    For Triton's `RemoteCacheManager` it is the backend that counts. Nothing is imported for it: a
    class that the user names may not exist yet.
    """
    manager = _name(seam.get()) or os.environ.get(MANAGER_VARIABLE, "")
    if manager != _REMOTE:
        return manager
    cache = getattr(getattr(triton, "knobs", None), "cache", None)
    backend = _name(getattr(cache, "__dict__", {}).get("remote_manager_class"))
    return backend or os.environ.get(_BACKEND_VARIABLE, "") or manager


def is_ours(manager: str) -> bool:
    """Whether `chosen_manager` has named a class of this package."""
    return manager.partition(":")[0].startswith(_OURS)


def watch_compile(kernels: Kernels) -> Callable[[], None]:
    """Goes around Triton's `compile`, wherever Triton has a name for it; gives the way back."""
    original: Callable[..., Any] = triton.compiler.compiler.compile

    @functools.wraps(original)
    def compile_and_end(*args: Any, **kwargs: Any) -> Any:
        with kernels.compiling():
            return original(*args, **kwargs)

    modules = _modules_with(original)
    for module in modules:
        vars(module)["compile"] = compile_and_end

    def undo() -> None:
        for module in modules:
            if vars(module).get("compile") is compile_and_end:
                vars(module)["compile"] = original

    return undo


def _modules_with(function: Callable[..., Any]) -> list[ModuleType]:
    return [
        module
        for name, module in tuple(sys.modules.items())
        if name.partition(".")[0] == "triton"
        and getattr(module, "__dict__", {}).get("compile") is function
    ]


def _name(manager: type | None) -> str:
    return "" if manager is None else f"{manager.__module__}:{manager.__qualname__}"
