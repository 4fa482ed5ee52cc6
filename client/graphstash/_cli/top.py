"""`graphstash top`: what the jobs of this host and of the team are doing now.

The server returns running compilations, and the counts of each job in this hour. This user's runs
on this host come from /proc: `graphstash run` sets environment variables with their names.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.live import Live
from rich.text import Text

from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    fail,
    format_bytes,
    format_seconds,
    load_config,
    out,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash._http.client import ServerClient
from graphstash._process.run_name import COMMAND_VARIABLE, RUN_VARIABLE, is_run, started_at
from graphstash.config import ClientConfig
from graphstash.errors import CacheError
from graphstash_schema.history import Grouping, HistoryQuery
from graphstash_schema.lease import MAX_LISTED_LEASES, HeldLeases
from graphstash_schema.stats import NamespaceStats

__all__ = ["top"]

_PROC: Final = Path("/proc")
_MAX_ENVIRONMENT_BYTES: Final = 1024**2


@dataclass
class HostRun:
    """A run of this user on this host."""

    run: str
    job: str  # empty if the user gave it no name
    command: str  # of `graphstash run`
    started_at: float  # seconds since 1970
    cpu_seconds: float = 0.0  # of the running processes
    pids: list[int] = field(default_factory=list)  # of the running processes
    compiling: int = 0  # leases that the processes hold


@dataclass(frozen=True)
class Snapshot:
    """The state at one time. `hits`, `misses` and `served_bytes` count from the creation of the
    namespace.

    Attributes:
        leases: running compilations, and how many requests wait for each.
        jobs: hits, misses, bytes and saved seconds of each job in this hour.
        error: why the server's figures are missing, or "".
        leases_error: why the running compilations are missing, or "".
    """

    at: datetime
    namespace: str
    hits: int
    misses: int
    served_bytes: int
    leases: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    runs: list[HostRun]
    error: str
    leases_error: str


def top(
    *,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds between two updates on a terminal.")
    ] = 2.0,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Show what the jobs of this host and of the team are doing now, until Ctrl-C.

    The server shows running compilations only to a token that may write to the namespace. Without
    a terminal, or with --json, the command prints the state once.
    """
    config = load_config(url=url, namespace=namespace)
    with closing(ServerClient(config)) as server:
        if out.is_terminal and not as_json:
            _watch(config, server, interval)
            return
        snapshot = _snapshot(config, server)
    if as_json:
        print_json(asdict(snapshot) | {"at": snapshot.at.isoformat()})
    else:
        _print(snapshot, None)
    if snapshot.error:
        fail(f"no figures of the team: {snapshot.error}")


def _watch(config: ClientConfig, server: ServerClient, interval: float) -> None:
    before = None
    with suppress(KeyboardInterrupt), Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            snapshot = _snapshot(config, server)
            with out.capture() as captured:
                _print(snapshot, before)
                if snapshot.error:
                    say(f"\nno figures of the team: {shown(snapshot.error)}")
            live.update(Text.from_ansi(captured.get()), refresh=True)
            before = snapshot
            time.sleep(interval)


def _snapshot(config: ClientConfig, server: ServerClient) -> Snapshot:
    own: NamespaceStats | None = None
    leases, error, leases_error = HeldLeases(), "", ""
    jobs: list[dict[str, Any]] = []
    runs = list(_host_runs())
    try:
        every = server.server_stats().namespaces
        own = next((each for each in every if each.namespace == config.namespace), None)
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        query = HistoryQuery(since=hour, by=Grouping.JOB, namespace=config.namespace)
        points = server.history(query).points
        jobs = [
            {
                "job": each.group,
                "hits": each.hits,
                "misses": each.misses,
                "served_bytes": each.served_bytes,
                "saved_compile_seconds": each.saved_compile_seconds,
            }
            for each in sorted(points, key=lambda point: -point.hits - point.misses)
        ]
    except CacheError as failed:
        error = leases_error = failed.detail
    else:
        try:
            leases = server.held_leases()
        except CacheError as failed:
            leases_error = failed.detail
    here = f"@{socket.gethostname()}:"
    for run in runs:
        run.compiling = sum(
            each.holder.endswith(tuple(f"{here}{pid}" for pid in run.pids))
            for each in leases.leases
        )
    return Snapshot(
        at=datetime.now(UTC),
        namespace=config.namespace,
        hits=own.hits if own else 0,
        misses=own.misses if own else 0,
        served_bytes=own.served_bytes if own else 0,
        leases=[each.model_dump(mode="json") for each in leases.leases],
        jobs=jobs,
        runs=runs,
        error=error,
        leases_error=leases_error,
    )


def _print(snapshot: Snapshot, before: Snapshot | None) -> None:
    figures = []
    if not snapshot.leases_error:
        more = " or more" if len(snapshot.leases) >= MAX_LISTED_LEASES else ""
        waiting = sum(each["waiters"] for each in snapshot.leases)
        figures += [f"{len(snapshot.leases)}{more} compiling", f"{waiting}{more} waiting"]
    if before is None or before.error or snapshot.error:
        seconds = 0.0
    else:
        seconds = (snapshot.at - before.at).total_seconds()
    if before is not None and seconds > 0:
        rates = [
            (getattr(snapshot, name) - getattr(before, name)) / seconds
            for name in ("hits", "misses", "served_bytes")
        ]
        figures += [f"{rates[0]:.1f} hits/s", f"{rates[1]:.1f} misses/s"]
        figures.append(f"{format_bytes(rates[2])}/s")
    line = f"{snapshot.namespace} at {snapshot.at:%H:%M:%S} UTC"
    say(": ".join([line, *filter(None, [", ".join(figures)])]), style="bold")
    say("\nthis host")
    if snapshot.runs:
        columns = (">compiling", ">processes", ">runs for", ">CPU", "job", "command")
        rows = [_run_cells(run, is_known=not snapshot.leases_error) for run in snapshot.runs]
        print_table(columns, rows, flexible=5)
    else:
        say("no job of yours runs under `graphstash run`")
    if snapshot.error:
        return
    say("\nthe team, compiling now")
    if snapshot.leases_error:
        say(f"unknown: {shown(snapshot.leases_error)}")
    elif snapshot.leases:
        headings = ("kind", "fingerprint", ">waiting", "device type", "holder")
        print_table(headings, map(_lease_cells, snapshot.leases), flexible=4)
    else:
        say("nothing")
    say("\nthe team, by job in this hour")
    if snapshot.jobs:
        headings = (">hits", ">misses", ">served", ">compiling saved", "job")
        print_table(headings, map(_job_cells, snapshot.jobs), flexible=4)
    else:
        say("no look-ups")


def _run_cells(run: HostRun, *, is_known: bool) -> tuple[str, ...]:
    return (
        f"{run.compiling}" if is_known else "-",
        f"{len(run.pids)}",
        format_seconds(max(0.0, time.time() - run.started_at)),
        format_seconds(run.cpu_seconds),
        shown(run.job, most=40) or "-",
        shown(run.command),
    )


def _lease_cells(lease: dict[str, Any]) -> tuple[str, ...]:
    key = lease["key"]
    return (
        key["kind"],
        key["fingerprint"][:12],
        f"{lease['waiters']}",
        key["device_type"],
        shown(lease["holder"], most=128) or "-",
    )


def _job_cells(job: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{job['hits']}",
        f"{job['misses']}",
        format_bytes(job["served_bytes"]),
        format_seconds(job["saved_compile_seconds"]),
        shown(job["job"], most=128) or "-",
    )


def _host_runs() -> Iterator[HostRun]:
    """Yield the runs of this user, latest start first: names of runs sort by start."""
    runs: dict[str, HostRun] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        # The process may end at any time.
        with suppress(OSError, ValueError, IndexError):
            if entry.stat().st_uid != os.geteuid():
                continue
            with (entry / "environ").open("rb") as file:
                text = file.read(_MAX_ENVIRONMENT_BYTES).decode(errors="replace")
            variables = dict(each.partition("=")[::2] for each in text.split("\0"))
            name = variables.get(RUN_VARIABLE, "")
            if not is_run(name) or int(entry.name) == os.getpid():
                continue
            # PID (NAME) STATE ...: the name may contain spaces and parentheses
            counters = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            run = runs.setdefault(
                name,
                HostRun(
                    run=name,
                    job=variables.get("GRAPHSTASH_JOB", ""),
                    command=variables.get(COMMAND_VARIABLE, "").replace("\x1f", " "),
                    started_at=started_at(name),
                ),
            )
            ticks = int(counters[11]) + int(counters[12])
            run.cpu_seconds += ticks / os.sysconf("SC_CLK_TCK")
            run.pids.append(int(entry.name))
    yield from sorted(runs.values(), key=lambda run: run.run, reverse=True)
