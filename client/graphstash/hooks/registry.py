"""All hooks that the installed packages register, in the entry-point group `graphstash.hooks`.

Under `graphstash run`, every Python process that imports a module outside the standard library
reads the registry. Importing `importlib.metadata` would take longer than everything else here, so
this module reads the files `entry_points.txt` itself. It finds no hooks of packages in zip files.

A hook that cannot be used is left out and named in `broken_hooks`. The other hooks still work. If
graphstash lacks package metadata (sources on PYTHONPATH), `broken_hooks` reports that.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Final

from graphstash.hooks.spec import HookSpec

__all__ = ["broken_hooks", "hook_specs"]

_GROUP: Final = "graphstash.hooks"


def hook_specs() -> Mapping[str, HookSpec]:
    """Return the usable hooks by name. The process reads the registry once."""
    return _read_registry()[0]


def broken_hooks() -> Mapping[str, str]:
    """Map the name of each hook that cannot be used to the reason."""
    return _read_registry()[1]


@cache
def _read_registry() -> tuple[Mapping[str, HookSpec], Mapping[str, str]]:
    specs: dict[str, HookSpec] = {}
    broken: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, place in _find_registrations(sys.path):
        if places.setdefault(name, place) != place:
            broken[f"{name} of {place}"] = f"{places[name]} has registered the name already"
        elif name not in specs:
            try:
                specs[name] = _load(name, place)
            except Exception as error:  # noqa: BLE001 - code of another package
                broken[name] = f"{place}: {error!r}"
    if not any(place.startswith("graphstash.") for place in places.values()):
        broken["of graphstash"] = (
            "its package metadata registers none (it runs from its sources, or was updated without "
            "an installer); install it with pip"
        )
    return specs, broken


def _load(name: str, place: str) -> HookSpec:
    module, _, attribute = place.partition(":")
    spec = getattr(import_module(module), attribute)
    if not isinstance(spec, HookSpec):
        raise TypeError(f"a {type(spec).__name__}, not a HookSpec")
    if spec.name != name:
        raise ValueError(f"the spec is named {spec.name}")
    return spec


def _find_registrations(path: list[str]) -> list[tuple[str, str]]:
    """Return the name and `module:attribute` of each hook, graphstash's own hooks first."""
    found = [
        each for folder in dict.fromkeys(path) for each in _registrations_in(folder or os.curdir)
    ]
    return sorted(dict.fromkeys(found), key=lambda each: not each[1].startswith("graphstash."))


def _registrations_in(folder: str) -> Iterator[tuple[str, str]]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return
    for name in sorted(names):
        if name.endswith((".dist-info", ".egg-info")):
            try:
                with open(f"{folder}/{name}/entry_points.txt", encoding="utf-8") as file:  # noqa: PTH123 - likewise
                    lines = file.read().splitlines()
            except (OSError, ValueError):
                continue
            yield from _parse_group(lines)


def _parse_group(lines: list[str]) -> Iterator[tuple[str, str]]:
    is_in_group = False
    for line in map(str.strip, lines):
        if line.startswith("["):
            is_in_group = line == f"[{_GROUP}]"
        elif is_in_group and "=" in line and not line.startswith(("#", ";")):
            name, _, place = line.partition("=")
            yield name.strip(), place.strip()
