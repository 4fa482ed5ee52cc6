"""`graphstash doctor` and its checks in this process, and a proxy that changes answers."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphstash._cli.doctor.command import examine
from graphstash._cli.doctor.findings import Finding, State
from support.hostile import Middlebox
from support.http_server import Answer, Request
from support.processes import graphstash_here
from support.waiting import PATIENT_VARIABLES

CANARY = "gst_canarycanaryabcd_" + "CANARY0" * 6 + "x"
"""A token that no server accepts, and that no output may contain."""


def diagnose(
    url: str = "http://127.0.0.1:9", *, probe: bool = False, **settings: object
) -> list[Finding]:
    """Return the findings of the doctor with these settings, whose names are in lower case."""
    environ = PATIENT_VARIABLES | {"GRAPHSTASH_URL": url}
    environ |= {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
    return list(examine(environ, {}, with_probe=probe))


def line(findings: Sequence[Finding], name: str, state: State | None = None) -> Finding:
    """Return the only finding of a name, or of a name and a state."""
    found = [each for each in findings if each.name == name and state in (None, each.state)]
    assert len(found) == 1, findings
    return found[0]


def expect(
    findings: Sequence[Finding], name: str, state: State, *, found: str = "", advice: str = ""
) -> Finding:
    """Require one finding of this name, or of this name and state, with these texts in it."""
    of_name = [each for each in findings if each.name == name]
    finding = line(findings, name, state if len(of_name) > 1 else None)
    assert finding.state == state, finding
    assert found in finding.found, finding
    assert advice in finding.advice, finding
    return finding


def doctor(*arguments: object, **variables: Any) -> subprocess.CompletedProcess[str]:
    return graphstash_here("doctor", *arguments, **PATIENT_VARIABLES | variables)


@contextmanager
def altering(
    upstream: str,
    status: int | None = None,
    body: bytes | None = None,
    *,
    at: str = "",
    **headers: str | None,
) -> Iterator[str]:
    """Start a proxy that changes every answer, or the answers of one path, and return its URL."""

    def change(request: Request, answer: Answer) -> Answer:
        if request.path.startswith(at):
            answer.status, answer.body = status or answer.status, body or answer.body
            changed = {name.replace("_", "-"): value for name, value in headers.items()}
            given = {**answer.headers, **changed}
            answer.headers = {name: value for name, value in given.items() if value is not None}
        return answer

    with Middlebox(upstream, change) as box:
        yield box.url
