"""graphstash: fetch a graph that a teammate has compiled instead of compiling it again.

    import graphstash
    graphstash.install()          # before the first computation; or: graphstash run -- python ...

Every training process imports this module, so it imports its submodules only when a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphstash._artifacts.stash import Fetched, Stash
    from graphstash._compile.cache import CompileCache
    from graphstash._compile.stats import Stats
    from graphstash._process.session import Session, get_or_compile, install, stats, uninstall
    from graphstash.config import ClientConfig
    from graphstash.errors import (
        CacheError,
        ConfigError,
        ConflictError,
        GraphstashError,
        LeaseLostError,
        Reason,
    )

__all__ = [
    "CacheError",
    "ClientConfig",
    "CompileCache",
    "ConfigError",
    "ConflictError",
    "Fetched",
    "GraphstashError",
    "LeaseLostError",
    "Reason",
    "Session",
    "Stash",
    "Stats",
    "__version__",
    "get_or_compile",
    "install",
    "stats",
    "uninstall",
]

_NAMES = {
    "_artifacts.stash": "Fetched Stash",
    "_compile.cache": "CompileCache",
    "_compile.stats": "Stats",
    "_process.session": "Session get_or_compile install stats uninstall",
    "config": "ClientConfig",
    "errors": "CacheError ConfigError ConflictError GraphstashError LeaseLostError Reason",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from graphstash_schema.version import __version__

        return __version__
    if name in _HOME:
        return getattr(import_module(f"graphstash.{_HOME[name]}"), name)
    raise AttributeError(f"module 'graphstash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
