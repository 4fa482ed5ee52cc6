"""`graphstash doctor`: print one line per finding, and its fix on the next line."""

import dataclasses
import logging
import os
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, TypeVar

import typer
from rich.text import Text

from graphstash._cli.doctor.access import check_access, probe_lease
from graphstash._cli.doctor.compilers import check_compilers, probe_hooks
from graphstash._cli.doctor.findings import Finding, State, Topic, fail, skipped, warn
from graphstash._cli.doctor.local import check_last_run, check_local
from graphstash._cli.doctor.server import check_server
from graphstash._cli.doctor.settings import check_settings, check_signatures
from graphstash._cli.output import Json, NamespaceOption, Url, out, plural, print_json
from graphstash.config import ClientConfig
from graphstash_schema.names import printable

__all__ = ["doctor", "examine", "show"]

_T = TypeVar("_T")

_MARKS: Final = {
    State.OK: ("✓", "green"),
    State.WARN: ("!", "yellow"),
    State.FAIL: ("✗", "red"),
    State.SKIPPED: ("-", "dim"),
}

_NAME_WIDTH: Final = 14

_NO_SETTINGS: Final = "skipped: the settings cannot be used"
_NO_SERVER: Final = "skipped: the server does not answer"
_NO_URL: Final = "skipped: there is no server"

_MAX_SHOWN: Final = 2000


def doctor(
    *,
    url: Url = None,
    namespace: NamespaceOption = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also import the compilers in a Python under `graphstash run` (up to 2 minutes), "
            "and take and release a lease.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check settings, server, TLS, token, clock, local disk, signatures and compilers.

    Suggests a fix for each problem and changes nothing. Exits with 1 if a check fails. Warnings
    alone exit with 0.
    """
    # Keep the client's warnings off stderr: the doctor reports them as findings.
    logging.getLogger("graphstash").addHandler(logging.NullHandler())
    findings = []
    for finding in examine(os.environ, {"url": url, "namespace": namespace}, with_probe=probe):
        findings.append(finding)
        if not as_json:
            show(finding)
    if as_json:
        print_json([dataclasses.asdict(each) for each in findings])
    else:
        out.print(_summary(findings))
    if any(each.state is State.FAIL for each in findings):
        raise typer.Exit(1)


def show(finding: Finding) -> None:
    mark, style = _MARKS[finding.state]
    line = Text(_wrapped(f"{mark} {finding.name:{_NAME_WIDTH}} ", finding.found))
    line.stylize(style, 0, len(mark))
    out.print(line, soft_wrap=True)
    if finding.advice:
        advice = _wrapped(f"  {'':{_NAME_WIDTH}} → ", finding.advice)
        out.print(Text(advice, style="bold"), soft_wrap=True)


def _wrapped(lead: str, text: str) -> str:
    """Return a finding on one line. On a terminal, wrap it, except in words such as paths."""
    shown = printable(text, most=_MAX_SHOWN)
    if not out.is_terminal:
        return lead + shown
    width = max(20, out.width - len(lead))
    lines = textwrap.wrap(shown, width, break_long_words=False, break_on_hyphens=False)
    return lead + f"\n{'':{len(lead)}}".join(lines)


def _summary(findings: list[Finding]) -> str:
    states = [each.state for each in findings]
    failures, warnings = states.count(State.FAIL), states.count(State.WARN)
    if not failures and not warnings:
        return "\nno problems found"
    return f"\n{plural(failures, 'failure')}, {plural(warnings, 'warning')}"


def examine(
    environ: Mapping[str, str], options: Mapping[str, str | None], *, with_probe: bool = False
) -> Iterator[Finding]:
    """Check every topic in order, and yield each finding at once.

    If the settings or the server fail, the topics that depend on them are skipped. The probe
    imports the compilers in a new Python process, and takes a lease.
    """
    config = yield from _guarded("settings", check_settings(environ, options))
    if config is None:
        for name in ("server", "token", "local tier", "signatures", "compilers"):
            yield skipped(name, _NO_SETTINGS)
        return
    yield from _examine_server(config, with_probe=with_probe)
    yield from _guarded("local tier", check_local(config))
    yield from _guarded("last run", check_last_run(config))
    yield from _guarded("signatures", check_signatures(config))
    yield from _guarded("compilers", check_compilers(config, environ))
    if with_probe:
        yield from _guarded("import probe", probe_hooks(environ, options))


def _examine_server(config: ClientConfig, *, with_probe: bool) -> Iterator[Finding]:
    if not config.url:
        yield warn(
            "server",
            "none: this job shares nothing and has only the local tier of this host",
            "set GRAPHSTASH_URL to the server of your team, or run `graphstash serve` on this host",
        )
        is_reached, why = None, _NO_URL
    else:
        is_reached, why = (yield from _guarded("server", check_server(config))), _NO_SERVER
    if is_reached:
        yield from _guarded("token", check_access(config))
        if with_probe:
            yield from _guarded("write probe", probe_lease(config))
        return
    for name in ("clock", "token", *(("write probe",) if with_probe else ())):
        yield skipped(name, why)


def _guarded(name: str, topic: Topic[_T]) -> Topic[_T | None]:
    """Turn an exception in a topic into a finding, so that the other topics still run."""
    try:
        return (yield from topic)
    except Exception as error:  # noqa: BLE001 - outermost frame of a topic
        yield fail(
            name,
            f"the check itself failed: {type(error).__name__}: {error}",
            "please report it; the other checks do not depend on it",
        )
        return None
