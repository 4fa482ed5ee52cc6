"""Programs for PJRT plug-ins: JAX's programs, for the CPU plug-in, which has one device.

Two programs with one key have the same meaning, as for JAX. The reverse holds only for programs
with the same choices, because the key contains names that do not change the executable.
"""

import importlib
import random
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from compilers.wrong_hits import pjrt as pairs
from compilers.wrong_hits.generated.programs import named
from compilers.wrong_hits.generated.recorder import Answer, asked_in_child

__all__ = ["AXES", "meaning", "prepare", "text"]

pairs.prepare()  # sets the variables that JAX reads at import
programs: Any = importlib.import_module("compilers.wrong_hits.generated.jax")

_SETTINGS = {name: part for name, part in programs.SETTINGS.items() if "in_locations" not in name}

_PLACES = named("", "donate_argnums=0")

AXES = programs.AXES | {"setting": _SETTINGS, "place": _PLACES}
"""Lists of parts, without settings that add source locations of operations to the key."""


def meaning(chosen: dict[str, str]) -> object:
    return chosen


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    chosen = {
        axis: next(name for name, part in names.items() if part == parts[axis])
        for axis, names in AXES.items()
    }
    compiled = repr(programs.meaning(chosen))
    return f"tell(compiled={compiled!r})\n{programs.text(parts, layout)}"


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or the reason for none."""
    return asked_in_child(pairs)
