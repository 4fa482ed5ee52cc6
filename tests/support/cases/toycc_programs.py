"""Programs of a compiler whose hook is in a package of its own; see docs/hooks.md."""

import ctypes
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import toycc

_SOURCE = "int answer(void) {{ return {}; }}"


def programs() -> dict[str, Any]:
    """Compile two programs, run them, and count the runs of gcc."""
    runs = []

    def run(command: list[str], **options: Any) -> Any:
        runs.append(command)
        return subprocess.run(command, **options)  # noqa: PLW1510 - as toycc asks

    vars(toycc)["subprocess"] = SimpleNamespace(run=run)
    results = []
    for number in (42, 43):
        with tempfile.NamedTemporaryFile(suffix=".so") as library:
            library.write(toycc.build(_SOURCE.format(number)))
            library.flush()
            results.append(ctypes.CDLL(library.name).answer())
    return {"results": results, "compiled": len(runs)}
