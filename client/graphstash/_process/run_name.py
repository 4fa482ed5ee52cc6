"""How the processes of one `graphstash run` know each other; imports nothing heavy."""

import os
import re
import time
from typing import Final

__all__ = ["RUN_VARIABLE", "is_run", "new_run", "this_run"]

RUN_VARIABLE: Final = "_GRAPHSTASH_RUN"
"""Names the run in the environment of all its processes."""

_RUN: Final = re.compile(r"[0-9]{20}-[0-9]{1,20}")


def this_run() -> str:
    """The run that this process is part of: that of `graphstash run`, or one of its own."""
    given = os.environ.get(RUN_VARIABLE, "")
    return given if is_run(given) else new_run()


def is_run(name: str) -> bool:
    """Whether `new_run` may have made this name."""
    return _RUN.fullmatch(name) is not None


def new_run() -> str:
    """A name for a run that begins now; later ones sort behind earlier ones."""
    return f"{time.time_ns():020d}-{os.getpid()}"
