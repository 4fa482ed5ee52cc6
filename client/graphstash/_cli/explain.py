"""`graphstash explain`: why a job compiled, and how two runs of a job differ."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Annotated, Final, NoReturn

import typer

from graphstash._cli.artifacts import find_one, is_prefix
from graphstash._cli.output import (
    CacheDir,
    Json,
    NamespaceOption,
    Url,
    fail,
    format_seconds,
    load_config,
    plural,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash._compile.explaining import Cause, EarlierRuns, cause_of, causes_of, format_causes
from graphstash._http.client import ServerClient
from graphstash._process.run_record import ProcessRecord, read_earlier_runs, read_last_run
from graphstash.config import ClientConfig
from graphstash_schema import ManifestName, Namespace
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.explanation import Description
from graphstash_schema.run import MAX_LISTED_RUNS, Run, RunMiss, RunName, RunQuery

__all__ = ["explain"]

_MAX_SHOWN_LABELS: Final = 4

_NO_CAUSE: Final = "the cause was not recorded; `graphstash run --explain` records it"


def explain(
    which: Annotated[
        str,
        typer.Argument(
            help='"last" is the last run on this host. Or one thing that it missed: the beginning '
            "of its label or fingerprint. Or the beginning of a stored artifact's fingerprint."
        ),
    ] = "last",
    *,
    job: Annotated[
        str | None,
        typer.Option(help="Compare the last two runs of this job (`graphstash run --job`)."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="With --job: compare its last run with this one instead, such as "
            "00012345678901234567-99; the beginning of its name is enough."
        ),
    ] = None,
    url: Url = None,
    namespace: NamespaceOption = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Explain why a run compiled: which flag, version, shape or line differs from stored artifacts.

    The server compares each missed graph with the nearest artifacts in the namespaces that you may
    read, in at most 16 of them. `graphstash run --explain` does the same at the end of a job. For a
    stored artifact, the command shows what differs in its nearest relative. Examples:

        graphstash explain
        graphstash explain "jit(train"
        graphstash explain --job nightly
    """
    config = load_config(url=url, namespace=namespace, cache_dir=cache_dir)
    if job is not None:
        _compare(config, job, against, as_json=as_json)
        return
    if against is not None:
        fail("--against needs --job: name the job of the runs", status=ExitStatus.USAGE)
    try:
        records = read_last_run(config.cache_dir)
    except OSError as error:
        fail(f"the records of earlier runs are not used: {error}")
    misses = [
        (description, reason)
        for record in records or ()
        for description, reason, _ in record.misses
        if which == "last"
        or description.key.fingerprint.startswith(which)
        or description.label.startswith(which)
    ]
    if not misses and is_prefix(which):
        _explain_stored(config, which, as_json=as_json)
        return
    if records is None or (which != "last" and not misses):
        no_match = f"the last run has missed nothing that begins with {shown(which)!r}"
        no_run = f"no run is recorded in {config.cache_dir}: start one with `graphstash run`"
        _fail_empty(no_run if records is None else no_match, [], as_json=as_json)
    _check_server(config, records)
    if records and namespace is None:
        config = dataclasses.replace(config, namespace=Namespace(records[0].namespace))
    causes = _causes(config, misses, records or ())
    notes = _notes(records or ()) if which == "last" else []
    if as_json:
        print_json([_as_json(cause) for cause in (*map(Cause, notes), *causes)])
        return
    command = shown(" ".join(records[0].argv), most=2000) if records else ""
    hits = sum(record.stats.hits for record in records)
    say(f"{command}: {plural(hits, 'hit')}, {_counted(misses, records or (), which)}")
    for note in notes:
        say(shown(note, most=400))
    for line in format_causes(causes):
        say(line)


def _fail_empty(message: str, empty: object, *, as_json: bool) -> NoReturn:
    """Fail without a result. With --json, print an empty result first."""
    if as_json:
        print_json(empty)
    fail(message)


def _causes(
    config: ClientConfig,
    misses: Sequence[tuple[Description, str | None]],
    records: Sequence[ProcessRecord],
) -> list[Cause]:
    started_at = min((record.run_started_at for record in records), default=0.0)
    earlier: Sequence[ProcessRecord] = ()
    with suppress(OSError):
        earlier = read_earlier_runs(config.cache_dir, before=started_at)
    on_disk = EarlierRuns(
        compiled=[
            (
                description,
                datetime.fromtimestamp(record.run_started_at, UTC),
                Namespace(record.namespace),
            )
            for record in earlier
            for description, _, _ in record.misses
        ],
        unsent={
            description.key: (record.unsent.get(description.key, ""), record.started_at)
            for record in earlier
            if (record.url, record.namespace) == (config.url, config.namespace)
            for description, _, _ in record.misses
        },
    )
    with closing(ServerClient(config)) as server:
        return causes_of(server, misses, started_at=started_at, earlier=on_disk)


def _counted(
    misses: Sequence[tuple[Description, str | None]], records: Iterable[ProcessRecord], which: str
) -> str:
    """Return the numbers of misses and of failures. For "last", the run's summary has the same."""
    failed = sum(reason is not None for _, reason in misses)
    count = len(misses) - failed
    if which == "last":
        count = sum(record.stats.misses for record in records)
        failed = max(0, len(misses) - count)
    return plural(count, "miss") + (f", {failed} compiled without the cache" if failed else "")


def _notes(records: Iterable[ProcessRecord]) -> list[str]:
    """Return why processes of a run did not use the cache, or did not share results."""
    notes = dict.fromkeys(note for record in records for note in record.notes)
    failed = Counter(why for record in records for why in record.unsent.values())
    return [
        *notes,
        *(
            f"{plural(count, 'upload')} failed ({why}), so other hosts compile again"
            for why, count in failed.most_common(_MAX_SHOWN_LABELS)
        ),
    ]


def _explain_stored(config: ClientConfig, prefix: str, *, as_json: bool) -> None:
    with closing(ServerClient(config)) as server:
        found = find_one(server, prefix)
        if found.description is None:
            fail(f"{found.key} has no description: `graphstash show {prefix}` prints its details")
        answer = server.explain(found.description)
    others = tuple(each for each in answer.relatives if each.differences)  # not identical copies
    cause = cause_of(answer.model_copy(update={"relatives": others}))
    name = shown(found.label, most=128) or str(found.key)
    cause.labels.append(name)
    if as_json:
        print_json([_as_json(cause)])
        return
    say(f"{name} is stored in {config.namespace}")
    if cause.nearest is None:
        say("nothing else like it is stored")
        return
    say(f"compared with its nearest relative: {cause.text}")
    for line in format_causes([cause])[2:]:
        say(line)


def _check_server(config: ClientConfig, records: list[ProcessRecord]) -> None:
    """Fail if the run used another server than the configured one, which receives the token."""
    used_url = next((record.url for record in records), config.url)
    if used_url != config.url:
        fail(
            f"the last run used {shown(used_url or 'no server')}, not "
            f"{config.url or 'no server'}: set GRAPHSTASH_URL, or --url, to the one to ask"
        )


def _as_json(cause: Cause) -> dict[str, object]:
    return {
        "cause": cause.text,
        "labels": cause.labels,
        "nearest": None if cause.nearest is None else cause.nearest.model_dump(mode="json"),
    }


# --- two runs of a job


def _compare(config: ClientConfig, job: str, against: str | None, *, as_json: bool) -> None:
    name = ManifestName(job)
    with closing(ServerClient(config)) as server:
        runs = server.runs(RunQuery(job=name, limit=MAX_LISTED_RUNS)).runs
        if not runs:
            _fail_empty(
                f"no run of the job {name} is reported in the namespace {config.namespace}: "
                f"start one with `graphstash run --job {name}`",
                {"job": name, "run": None, "against": None, "new": [], "again": []},
                as_json=as_json,
            )
        last = server.run(runs[0].run)
        other = _other(server, runs[1:], against)
    missed_before = {_name(miss) for miss in other.misses} if other else set()
    new = [miss for miss in last.misses if _name(miss) not in missed_before]
    again = [miss for miss in last.misses if _name(miss) in missed_before]
    if as_json:
        print_json(
            {
                "job": name,
                "run": last.model_dump(mode="json"),
                "against": None if other is None else other.model_dump(mode="json"),
                "new": [each.model_dump(mode="json") for each in new],
                "again": [each.model_dump(mode="json") for each in again],
            }
        )
        return
    _print_runs(last, other)
    if not last.misses:
        say("\nthe last run missed nothing")
    _print_misses("missed, not by the run before" if other else "missed", new)
    _print_misses("missed by both", again)


def _other(server: ServerClient, earlier: Iterable[Run], against: str | None) -> Run | None:
    if against is None:
        other = next(iter(earlier), None)
        return None if other is None else server.run(other.run)
    names = [each.run for each in earlier if each.run.startswith(against)]
    if len(names) > 1 and against not in names:
        fail(f"{len(names)} runs begin with {shown(against)!r}: give more characters")
    if not names:
        names = [RunName(against)]  # older than the listed runs
    return server.run(RunName(against) if against in names else names[0])


def _print_runs(last: Run, other: Run | None) -> None:
    runs = [last, *([other] if other else [])]
    sums = [run.sums for run in runs]
    rows = [
        ("run", *(each.run for each in runs)),
        ("started", *(f"{each.started_at:%Y-%m-%d %H:%M}" for each in runs)),
        ("program", *(shown(each.program, most=40) for each in runs)),
        ("took", *(format_seconds(each.seconds) for each in runs)),
        ("processes", *(f"{each.processes}" for each in runs)),
        ("hits", *(f"{each.hits}" for each in sums)),
        ("misses", *(f"{each.misses}" for each in sums)),
        ("fallbacks", *(f"{each.fallbacks}" for each in sums)),
        ("compiling", *(format_seconds(each.compile_seconds) for each in sums)),
        ("not spent", *(format_seconds(each.saved_compile_seconds) for each in sums)),
    ]
    headings = ("", "last run", *(("against",) if other else ()))
    print_table(headings, rows, flexible=1)


def _print_misses(title: str, misses: list[RunMiss]) -> None:
    if not misses:
        return
    causes: dict[str, list[RunMiss]] = {}
    for miss in misses:
        causes.setdefault(miss.cause or _NO_CAUSE, []).append(miss)
    say(f"\n{title}:")
    for cause, each in sorted(causes.items(), key=lambda one: -len(one[1])):
        seconds = format_seconds(sum(miss.seconds for miss in each))
        say(f"{plural(len(each), 'miss')} ({seconds}): {shown(cause)}")
        names = list(dict.fromkeys(_name(miss) for miss in each))
        more = len(names) - _MAX_SHOWN_LABELS
        listed = ", ".join(names[:_MAX_SHOWN_LABELS])
        say(f"    {listed}" + (f" and {more} more" if more > 0 else ""))


def _name(miss: RunMiss) -> str:
    return shown(miss.label, most=80) or miss.key.short
