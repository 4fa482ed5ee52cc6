"""graphstash: a graph that anyone in the team has compiled is fetched, not compiled again.

    import graphstash
    graphstash.install()          # before the first computation; or: graphstash run -- python ...

This module imports nothing until a name is used: it is part of every training process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphstash._compile import CompileCache
    from graphstash._config import ClientConfig
    from graphstash._errors import (
        CacheError,
        ConfigError,
        ConflictError,
        GraphstashError,
        LeaseLostError,
        Reason,
    )
    from graphstash._session import Session, get_or_compile, install, stats, uninstall
    from graphstash._stash import Fetched, Stash
    from graphstash._stats import Stats

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

_HOME = {
    "CompileCache": "_compile",
    "ClientConfig": "_config",
    "CacheError": "_errors",
    "ConfigError": "_errors",
    "ConflictError": "_errors",
    "GraphstashError": "_errors",
    "LeaseLostError": "_errors",
    "Reason": "_errors",
    "Session": "_session",
    "get_or_compile": "_session",
    "install": "_session",
    "stats": "_session",
    "uninstall": "_session",
    "Fetched": "_stash",
    "Stash": "_stash",
    "Stats": "_stats",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("graphstash")
    if name in _HOME:
        return getattr(import_module(f"graphstash.{_HOME[name]}"), name)
    raise AttributeError(f"module 'graphstash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
