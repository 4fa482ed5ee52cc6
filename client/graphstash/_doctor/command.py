"""`graphstash doctor`: one line per finding, and below it what to do."""

import dataclasses
import json
import logging
import os
import sys
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from graphstash._doctor.examination import examine
from graphstash._doctor.findings import Finding, State, plural

__all__ = ["doctor"]

_MARKS: Final = {
    State.OK: ("✓", "green"),
    State.WARN: ("!", "yellow"),
    State.FAIL: ("✗", "red"),
    State.SKIPPED: ("-", "dim"),
}

_NAME_WIDTH: Final = 14


def doctor(
    *,
    url: Annotated[str | None, typer.Option(help="Server, e.g. http://cache.internal:8077")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace to read and write")] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also import the compilers in a Python under `graphstash run` (up to 2 minutes), "
            "and take and release a lease",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts")] = False,
) -> None:
    """Look at settings, server, TLS, token, clock, local tier and compilers, and say what to do.

    Changes nothing. Ends with 1 when something fails; warnings alone end with 0.
    """
    # A word of an error may have letters that this terminal has not.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    # What is worth a warning of the client is a finding here.
    logging.getLogger("graphstash").addHandler(logging.NullHandler())
    out = Console(highlight=False)
    findings = []
    for finding in examine(os.environ, {"url": url, "namespace": namespace}, with_probe=probe):
        findings.append(finding)
        if not as_json:
            _show(out, finding)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    else:
        out.print(_summary(findings))
    if any(each.state is State.FAIL for each in findings):
        raise typer.Exit(1)


def _show(out: Console, finding: Finding) -> None:
    mark, style = _MARKS[finding.state]
    line = Text.assemble(
        (mark, style), f" {finding.name:{_NAME_WIDTH}} {_printable(finding.found)}"
    )
    out.print(line, soft_wrap=True)
    if finding.advice:
        advice = f"  {'':{_NAME_WIDTH}} → {_printable(finding.advice)}"
        out.print(Text(advice, style="bold"), soft_wrap=True)


def _printable(text: str) -> str:
    """Without what a stranger's answer could do to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _summary(findings: list[Finding]) -> str:
    states = [each.state for each in findings]
    failures, warnings = states.count(State.FAIL), states.count(State.WARN)
    if not failures and not warnings:
        return "\nnothing is wrong"
    return f"\n{plural(failures, 'failure')}, {plural(warnings, 'warning')}"
