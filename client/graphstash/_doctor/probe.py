"""`--probe`: what cannot be known by looking. Starts a Python that imports the compilers as a job
would, and takes a lease on the server as a job would before it compiles.

The lease is on a random key and is released at once as failed: no artifact comes of it, nobody else
can meet it, and the server forgets it as it forgets every ended lease.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from graphstash._config import ENVIRONMENT_PREFIX, ClientConfig
from graphstash._doctor.compilers import modules_to_import
from graphstash._doctor.findings import Finding, fail, ok, skipped, warn
from graphstash._errors import CacheError, RefusedError
from graphstash._remote import Remote
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, Fingerprint, LeaseOutcome

__all__ = ["probe_hooks", "probe_lease"]

_IMPORT_SECONDS: Final = 120.0
"""torch_xla takes 20 s on a busy host; a broken driver may hang for ever."""


def probe_lease(config: ClientConfig) -> Iterator[Finding]:
    """Takes and releases a lease, which needs the right to write."""
    if config.read_only:
        yield skipped("write probe", "GRAPHSTASH_READ_ONLY: this job takes no lease")
        return
    key = ArtifactKey(
        kind=ArtifactKind.SCHEDULE,
        device_type=DeviceType("doctor"),
        fingerprint=Fingerprint(secrets.token_hex(32)),
    )
    with closing(Remote(config)) as remote:
        try:
            lease = remote.acquire(key)
            if lease.token is not None:
                remote.release(key, lease.token, LeaseOutcome.FAILED)
        except RefusedError as error:
            yield fail(
                "write probe",
                f"the server refuses a lease in {config.namespace!r}: {error}",
                "get a token that may write there, or set GRAPHSTASH_READ_ONLY=true",
            )
            return
        except CacheError as error:
            yield fail("write probe", f"no lease: {error}", "the server's log has the reason")
            return
    yield ok("write probe", f"a lease in {config.namespace!r} was taken and released")


def probe_hooks(
    environ: Mapping[str, str],
    options: Mapping[str, str | None],
    *,
    limit_seconds: float = _IMPORT_SECONDS,
) -> Iterator[Finding]:
    """Imports every installed compiler under `graphstash run` and tells which hooks are in place.

    Args:
        environ: the environment of the job.
        options: of `graphstash run`, by name without dashes; None leaves one out.
        limit_seconds: longest time for all imports together.
    """
    modules = modules_to_import()
    if not modules:
        yield skipped("import probe", "no compiler is installed")
        return
    with tempfile.TemporaryDirectory(prefix="graphstash-doctor-") as folder:
        report = Path(folder) / "report"
        ended = _import(environ, options, report, modules, limit_seconds)
        told = _read(report)
    for each in told.get("errors", ()):
        yield warn(
            "import probe", str(each), "the job's own import fails likewise: mend that first"
        )
    if ended is not None:
        module = told.get("importing")
        when = f"while it imported {module}" if module else "before it imported anything"
        yield fail("import probe", f"{ended} {when}", _HOW_TO_REPEAT)
        return
    if not told.get("is_started"):
        yield fail(
            "import probe",
            "`graphstash run` did not reach a Python that imports "
            f"{', '.join(modules)}: something resets PYTHONPATH, or {ENVIRONMENT_PREFIX}ENABLED "
            "is off",
            "call graphstash.install() at the top of the script instead",
        )
        return
    for each in told.get("warnings", ()):
        yield warn("import probe", str(each).removeprefix("graphstash: "), _HOW_TO_REPEAT)
    present = told.get("hooks", {})
    aside = [name for name, is_there in present.items() if not is_there]
    yield ok(
        "import probe",
        f"in place: {', '.join(name for name in present if present[name]) or 'no hook'}"
        + (f"; stepped aside: {', '.join(aside)}" if aside else ""),
    )


_HOW_TO_REPEAT: Final = (
    "see it by hand: graphstash run -- python -c 'import <compiler>'; the README's table of "
    "compilers has the versions that work"
)


def _import(
    environ: Mapping[str, str],
    options: Mapping[str, str | None],
    report: Path,
    modules: list[str],
    limit_seconds: float,
) -> str | None:
    """How the Python ended, in words; None when it ended well."""
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    witness = [sys.executable, "-m", "graphstash._doctor.witness", str(report), *modules]
    # A job's name would make it fetch that job's artifacts.
    variables = {k: v for k, v in environ.items() if k != f"{ENVIRONMENT_PREFIX}JOB"}
    with subprocess.Popen(
        [sys.executable, "-m", "graphstash", "run", "--quiet", *given, "--", *witness],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that what it starts ends with it
    ) as python:
        try:
            status = python.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(python.pid, signal.SIGKILL)
            return f"a Python was not done after {limit_seconds:g} s"
        finally:
            if python.poll() is None:  # interrupted: it must not go on alone
                with suppress(ProcessLookupError):
                    os.killpg(python.pid, signal.SIGKILL)
    if status < 0:
        return f"a Python was ended by {signal.Signals(-status).name}"
    return f"a Python ended with status {status}" if status else None


def _read(report: Path) -> dict[str, Any]:
    try:
        told = json.loads(report.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
