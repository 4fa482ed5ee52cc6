"""Labels of programs: the name from the framework, or the user's line that compiles."""

import gc
import re
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["function_label", "main_thread_line", "user_line"]

_TRANSFORMED: Final = re.compile(r"(jit|pmap|shard_map|xla_call)_+(.+)", re.ASCII)

_MAX_FRAMES: Final = 200

_reads_frames: Final = threading.Lock()


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


def main_thread_line() -> str:
    """Return the main thread's innermost line outside libraries, from any thread.

    A garbage collection inside of `sys._current_frames` may deadlock all threads (Python 3.11.7,
    gh-106883), so it is paused. While another thread does the same, there is no line.
    """
    if not _reads_frames.acquire(blocking=False):
        return ""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if was_enabled:
            gc.enable()
        _reads_frames.release()
    try:
        return user_line(frame)
    finally:
        del frame  # may be this function's own: the cycle would keep the variables of all callers


@cache
def _is_library(filename: str) -> bool:
    return filename.startswith(_library_prefixes())


@cache
def _library_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    own = str(Path(__file__).parents[1])
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return ("<", own, *{paths[name] for name in names})
