"""Programs for PJRT plug-ins: those of JAX, for the plug-in of the CPU, which has one device.

Two programs that share a key have the same meaning, as for JAX. The reverse holds only for programs
with the same choices: the key contains names that change no executable.
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

pairs.prepare()  # sets what JAX reads when it is imported
programs: Any = importlib.import_module("compilers.wrong_hits.generated.jax")

_SETTINGS = {name: part for name, part in programs.SETTINGS.items() if "in_locations" not in name}

_PLACES = named("", "donate_argnums=0")

AXES = programs.AXES | {"setting": _SETTINGS, "place": _PLACES}
"""Without settings that put the places of operations in the text into the key."""


def meaning(chosen: dict[str, str]) -> object:
    """Return all choices."""
    return chosen


def text(parts: Mapping[str, str], layout: random.Random) -> str:
    """Return the text of a program."""
    chosen = {
        axis: next(name for name, part in names.items() if part == parts[axis])
        for axis, names in AXES.items()
    }
    compiled = repr(programs.meaning(chosen))
    return f"tell(compiled={compiled!r})\n{programs.text(parts, layout)}"


def prepare() -> Callable[[CodeType, dict[str, Any]], Answer]:
    """Return a function that runs a program and returns its key, or why it has none."""
    return asked_in_child(pairs)
