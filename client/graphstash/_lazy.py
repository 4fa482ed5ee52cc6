"""Import a package's submodules when one of their names is first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` functions for a package.

    Args:
        package: name of the package.
        names: maps each module, relative to the package, to its names, separated by spaces.
    """
    home = {name: module for module, several in names.items() for name in several.split()}

    def find(name: str) -> Any:
        if name in home:
            return getattr(import_module(f"{package}.{home[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted(home)
