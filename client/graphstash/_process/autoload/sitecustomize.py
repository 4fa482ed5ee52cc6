"""Register the cache in every Python process under `graphstash run`, before user code runs.

`graphstash run` prepends this folder to PYTHONPATH, which child processes inherit. This module only
registers an import hook, and then runs the user's own `sitecustomize`, whose errors pass through. A
Python without graphstash, or with another version, starts normally. If it is the command itself, a
line on standard error says so.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _chain() -> None:
    """Run the sitecustomize module that this one hides, if there is one."""
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
    except Exception:  # noqa: BLE001 - another environment's Python, possibly a much older version
        # Name the Python of the command itself only: its children may be any programs.
        # `graphstash run` replaces itself with it, or waits for it if a setting may end the job.
        runner = os.getppid() if "_GRAPHSTASH_END" in os.environ else os.getpid()
        is_command = os.environ.get("_GRAPHSTASH_RUN", "").endswith("-" + str(runner))
        if is_command and sys.stderr:
            sys.stderr.write(
                f"graphstash: {sys.executable} cannot import graphstash: it runs without the "
                "cache. Install graphstash in its environment\n"
            )
        return
    load()


_self = sys.modules["sitecustomize"]
_register()
_chain()
