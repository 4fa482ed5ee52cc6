"""Find plug-ins: shared libraries with a `GetPjrtApi`, by path or among the loaded libraries.

A process loads a library once, by its real path, and `GetPjrtApi` always returns the same table. A
change to that table therefore affects all frameworks.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graphstash.hooks.environment import sample_of
from graphstash.hooks.mappings import MemoryMapping, memory_mappings
from graphstash.hooks.pjrt.abi import Function
from graphstash.hooks.pjrt.api import Api

__all__ = ["Plugin", "is_writable", "loaded_plugins", "plugin_at"]


@dataclass(frozen=True)
class Plugin:
    """A plug-in that is loaded in this process. `path` is the file that contains its code."""

    path: Path
    api: Api

    @cached_property
    def identity(self) -> str:
        """Text that differs between builds. Raises OSError if the plug-in's file is gone."""
        return f"{self.path.name} {sample_of(self.path)}"


def plugin_at(path: str) -> Plugin | None:
    """Load the library at a path. Return its plug-in, not initialized, or None if it is none.

    Raises:
        OSError: The library cannot be loaded.
    """
    return _plugin_of(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL))


def loaded_plugins() -> Iterator[Plugin]:
    """Yield the plug-ins that this process has loaded."""
    seen = set()
    for path in dict.fromkeys(each.path for each in memory_mappings() if ".so" in each.path):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # the file is mapped as data, or has been deleted
            continue
        # A library that links a plug-in also resolves `GetPjrtApi`, to the same table.
        plugin = _plugin_of(library)
        if plugin is not None and plugin.api.table not in seen:
            seen.add(plugin.api.table)
            yield plugin


def is_writable(address: int) -> bool:
    """Return whether this process may write to the page that contains `address`."""
    mapping = _mapping_of(address)
    return mapping is not None and "w" in mapping.permissions


def _plugin_of(library: ctypes.CDLL) -> Plugin | None:
    try:
        get_api = library.GetPjrtApi
    except AttributeError:
        return None
    get_api.argtypes = ()
    get_api.restype = ctypes.c_void_p
    table = get_api()
    if not table:
        return None
    api = Api(table)
    code = _mapping_of(api.pointer(Function.CLIENT_COMPILE))
    return Plugin(Path(code.path if code and code.path else library._name), api)


def _mapping_of(address: int) -> MemoryMapping | None:
    return next((each for each in memory_mappings() if each.start <= address < each.end), None)
