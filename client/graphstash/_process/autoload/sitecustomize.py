"""Runs at the start of every Python process under `graphstash run`, before the user's code.

`graphstash run` puts this folder at the front of PYTHONPATH; children inherit it. Standard library
only, no work beyond registering for the import of a compiler, and no exception: a Python that has
no graphstash, or another version, just starts.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Runs the sitecustomize that this one hides, if there is any."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - the next one
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = _self


def _register() -> None:
    try:
        from graphstash._entry_points import load
    except Exception:  # noqa: BLE001 - another environment's Python, perhaps of another age
        return
    load()


_self = sys.modules["sitecustomize"]
_register()
_chain()
