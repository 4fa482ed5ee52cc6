"""Run the job of `cases/tracing.py`, or hide OpenTelemetry from a process."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.processes import captured
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT_VARIABLES


def run_trace_job(
    directory: Path,
    url: str,
    environment: Mapping[str, str],
    *,
    mode: str = "alone",
    host: str = "a",
    token: str = "",
) -> dict[str, Any]:
    """Return the job's report. Jobs of one `host` share their local tier."""
    report = directory / "report.json"
    job = captured(
        [sys.executable, RUN_CASE, report, *case_arguments("tracing:ask", mode=mode)],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(directory),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **PATIENT_VARIABLES,
            "GRAPHSTASH_URL": url,
            "GRAPHSTASH_CACHE_DIR": str(directory / host),
            # Prefetching would download the artifacts before the job asks.
            "GRAPHSTASH_PREFETCH_LIMIT": "0",
            **({"GRAPHSTASH_TOKEN": token} if token else {}),
            **environment,
        },
        timeout=120,
    )
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}: {job.stderr}")
    return json.loads(report.read_text())


def take_away(directory: Path, package: str) -> Path:
    """Return a folder for PYTHONPATH that makes the import of a package fail."""
    folder = directory.joinpath("taken-away", *package.split("."))
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
    )
    return directory / "taken-away"
