"""How the processes of one `graphstash run` know each other; imports nothing heavy."""

import os
import time
from typing import Final

__all__ = ["RUN_VARIABLE", "new_run"]

RUN_VARIABLE: Final = "_GRAPHSTASH_RUN"
"""Names the run in the environment of all its processes."""


def new_run() -> str:
    """A name for a run that begins now; later ones sort behind earlier ones."""
    return f"{time.time_ns():020d}-{os.getpid()}"
