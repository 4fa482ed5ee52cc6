"""Import a submodule of a package when one of its names is first used (PEP 562)."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` functions for a package.

    The package imports its lazy names in a block `if TYPE_CHECKING:`. The first use of such a name
    parses the package's source to find the modules, which takes a millisecond.
    """

    @cache
    def modules() -> dict[str, str]:
        import ast  # every job imports a lazy package, and few use its lazy names
        import inspect

        tree = ast.parse(inspect.getsource(sys.modules[package]))
        return {
            alias.name: node.module
            for block in tree.body
            if isinstance(block, ast.If)
            for node in block.body
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
        }

    def find(name: str) -> Any:
        module = None if name.startswith("__") else modules().get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module), name)

    return find, lambda: sorted(modules())
