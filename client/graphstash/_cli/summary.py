"""`graphstash summary`: what the last run on this host hit and compiled, in Markdown for CI."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from graphstash._cli.markdown import plain, table
from graphstash._cli.output import (
    CacheDir,
    Json,
    Url,
    fail,
    format_seconds,
    load_config,
    plural,
    print_json,
    shown,
)
from graphstash._compile.explaining import causes_of
from graphstash._http.client import ServerClient
from graphstash._process.run_record import ProcessRecord, read_last_run
from graphstash.config import ClientConfig
from graphstash_schema import Namespace

__all__ = ["summary"]

_SHOWN: Final = 20


@dataclass(frozen=True)
class Compiled:
    """One program that the run compiled.

    Attributes:
        label: label of the program, or its kind and the start of its fingerprint.
        seconds: compile time.
        why: cause of the miss. "" if it is unknown, or not among the 20 longest compilations.
    """

    label: str
    seconds: float
    why: str


@dataclass(frozen=True)
class RunSummary:
    """A run's use of the cache.

    Attributes:
        command: command line of its first process.
        started_at: start of its first process, or None if no run is recorded.
        hits: artifacts that it got from the cache.
        misses: artifacts that it compiled because no cache had them.
        troubled: artifacts that it compiled because the cache could not help.
        compile_seconds: total compile time of the run.
        saved_compile_seconds: compile time that the publishers of the hits measured.
        compiled: the recorded programs, at most 512 per process, longest compile time first.
        notes: what kept the run from using the cache.
    """

    command: str
    started_at: datetime | None
    hits: int
    misses: int
    troubled: int
    compile_seconds: float
    saved_compile_seconds: float
    compiled: Sequence[Compiled]
    notes: Sequence[str]

    @property
    def needed(self) -> int:
        """Number of artifacts that the run needed."""
        return self.hits + self.misses + self.troubled

    @property
    def hit_rate(self) -> float | None:
        """Share of hits, from 0 to 1, or None if the run needed no artifact."""
        return self.hits / self.needed if self.needed else None


def summary(
    *,
    minimum_hit_rate: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of hits below which the exit status is 1, from 0 to 1. Above 0, it is also "
            "1 for a run that did not use the cache.",
        ),
    ] = 0.0,
    url: Url = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Print what the last run on this host hit and compiled, in Markdown.

    The table lists the programs that compiled longest, and why no stored artifact served them. In
    CI it shows what a change makes the team compile again. A run that did not use the cache is not
    recorded. Example:

        graphstash summary >> "$GITHUB_STEP_SUMMARY"
    """
    config = load_config(url=url, cache_dir=cache_dir)
    try:
        records = read_last_run(config.cache_dir)
    except OSError as error:
        fail(f"the records of earlier runs are not used: {error}")
    found = _read(config, records or ())
    if as_json:
        started_at = found.started_at and found.started_at.isoformat()
        print_json({**asdict(found), "started_at": started_at, "hit_rate": found.hit_rate})
    else:
        typer.echo(_markdown(found))
    if (found.hit_rate or 0.0) < minimum_hit_rate:
        rate = "no hit rate" if found.hit_rate is None else f"hit rate {found.hit_rate:.1%}"
        fail(f"{rate}, and --minimum-hit-rate={minimum_hit_rate:g}")


def _read(config: ClientConfig, records: Sequence[ProcessRecord]) -> RunSummary:
    stats = [record.stats for record in records]
    misses = [each for record in records for each in record.misses]
    misses.sort(key=lambda each: -each[2])
    why = {}
    if misses:
        asked = [(description, trouble) for description, trouble, _ in misses[:_SHOWN]]
        namespace = Namespace(records[0].namespace)
        with closing(ServerClient(replace(config, namespace=namespace))) as server:
            started_at = min(record.run_started_at for record in records)
            causes = causes_of(server, asked, started_at=started_at)
        why = {key: cause.text for cause in causes for key in cause.keys}
    return RunSummary(
        command=" ".join(records[0].argv) if records else "",
        started_at=datetime.fromtimestamp(records[0].started_at, UTC) if records else None,
        hits=sum(each.hits for each in stats),
        misses=sum(each.misses for each in stats),
        troubled=sum(record.uncached for record in records),
        compile_seconds=sum(each.compile_seconds for each in stats),
        saved_compile_seconds=sum(each.saved_compile_seconds for each in stats),
        compiled=[
            Compiled(
                description.label or description.key.short,
                seconds,
                why.get(description.key, ""),
            )
            for description, _, seconds in misses
        ],
        notes=list(dict.fromkeys(note for record in records for note in record.notes)),
    )


def _markdown(found: RunSummary) -> str:
    lines = ["## graphstash", ""]
    if found.started_at is None:
        return "\n".join([*lines, "No run on this host is recorded to have used the cache.", ""])
    troubled = f", {found.troubled:,} compiled without the cache" if found.troubled else ""
    rate = "" if found.hit_rate is None else f" ({found.hit_rate:.0%} hits)"
    lines.append(
        f"`{shown(found.command.replace('`', ' '), most=200)}` of {found.started_at:%F %R} UTC: "
        f"{plural(found.hits, 'hit')}, {plural(found.misses, 'miss')}{troubled}{rate}. It compiled "
        f"for {format_seconds(found.compile_seconds)}; the hits saved "
        f"{format_seconds(found.saved_compile_seconds)}.\n"
    )
    lines += [f"* {plain(note)}" for note in found.notes]
    lines += [""] if found.notes else []
    if found.compiled:
        rows = [
            (plain(each.label), format_seconds(each.seconds), plain(each.why) or "not known")
            for each in found.compiled[:_SHOWN]
        ]
        lines += ["### Compiled", "", *table(("program", "compiled", "why"), rows, numbers="-:-")]
        if (more := found.misses + found.troubled - min(len(found.compiled), _SHOWN)) > 0:
            lines.append(f"And {plural(more, 'program')} more.\n")
    return "\n".join(lines)
