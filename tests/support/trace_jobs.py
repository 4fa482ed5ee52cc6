"""Runs trace_job.py, and takes OpenTelemetry away from a process."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["LARGE", "run_trace_job", "take_away"]

LARGE = 200_000
"""Bytes of its artifact: more than a server keeps in memory."""

_JOB = Path(__file__).with_name("trace_job.py")


def run_trace_job(
    directory: Path,
    url: str,
    environment: Mapping[str, str],
    *,
    mode: str = "alone",
    host: str = "a",
    token: str = "",
) -> dict[str, Any]:
    """What it prints; jobs of one `host` share their local tier."""
    answer = subprocess.run(
        [sys.executable, str(_JOB), mode, str(LARGE)],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(directory),
            "GRAPHSTASH_URL": url,
            "GRAPHSTASH_CACHE_DIR": str(directory / host),
            "GRAPHSTASH_PREFETCH_LIMIT": "0",  # what it asks for comes when it asks
            **({"GRAPHSTASH_TOKEN": token} if token else {}),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def take_away(directory: Path, package: str) -> Path:
    """A folder for PYTHONPATH with which a package cannot be imported."""
    folder = directory.joinpath("taken-away", *package.split("."))
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
    )
    return directory / "taken-away"
