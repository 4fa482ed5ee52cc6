"""Labels of programs: the name from the framework, or the user's line that compiles."""

import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["function_label", "user_line"]

_TRANSFORMED: Final = re.compile(r"(jit|pmap|shard_map|xla_call)_+(.+)", re.ASCII)

_MAX_FRAMES: Final = 200


def function_label(module_name: str) -> str:
    """Return a module's name as its user wrote it: `jit_train_step` is `jit(train_step)`."""
    found = _TRANSFORMED.fullmatch(module_name)
    return f"{found[1]}({found[2]})" if found else module_name


def user_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of a stack outside libraries, e.g. `train.py:41 in main`.

    Omits the file's directory, because the whole team can read a label. The stack begins at
    `frame`, by default the caller's.
    """
    frame = frame or sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if not _is_library(code.co_filename):
            name = "" if code.co_name == "<module>" else f" in {code.co_name}"
            return f"{Path(code.co_filename).name}:{frame.f_lineno}{name}"
        frame = frame.f_back
    return ""


@cache
def _is_library(filename: str) -> bool:
    return filename.startswith(_places())


@cache
def _places() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    own = str(Path(__file__).parents[1])
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return ("<", own, *{paths[name] for name in names})
