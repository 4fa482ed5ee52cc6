"""`graphstash summary`: what the last run on this host hit and compiled, in Markdown for CI."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
    server_of,
    shown,
)
from graphstash._compile.explaining import causes_of
from graphstash._process.run_record import ProcessRecord, read_last_run
from graphstash.config import ClientConfig
from graphstash.errors import CacheError
from graphstash_schema import Namespace

__all__ = ["summary"]

_SHOWN: Final = 20
_SOURCES: Final = ("server", "prefetched", "host", "ranks")


@dataclass(frozen=True)
class Compiled:
    """One program that the run compiled.

    Attributes:
        label: what its user calls it.
        seconds: compile time.
        why: the cause in words, or an empty string if it is not known.
    """

    label: str
    seconds: float
    why: str


@dataclass(frozen=True)
class RunSummary:
    """What a run did with the cache.

    Attributes:
        command: command line of its first process.
        hits: artifacts that it did not compile.
        misses: artifacts that it compiled because nobody had stored them.
        troubled: artifacts that it compiled because the cache could not help.
        compile_seconds: time spent on these two.
        saved_compile_seconds: compile time that the publishers of the hits measured.
        compiled: programs, longest compile time first.
    """

    command: str
    hits: int
    misses: int
    troubled: int
    compile_seconds: float
    saved_compile_seconds: float
    compiled: Sequence[Compiled]

    @property
    def hit_rate(self) -> float:
        """Share of hits, from 0 to 1. A run that needed nothing compiled has 1."""
        needed = self.hits + self.misses + self.troubled
        return self.hits / needed if needed else 1.0


def summary(
    *,
    minimum_hit_rate: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of hits below which the exit status is 1, from 0 to 1."
        ),
    ] = 0.0,
    url: Url = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Print what the last run on this host hit and compiled, in Markdown.

    The table lists the programs that compiled longest, and why no stored artifact served them. In
    CI it shows what a change makes the team compile again. Example:

        graphstash summary >> "$GITHUB_STEP_SUMMARY"
    """
    config = load_config(url=url, cache_dir=cache_dir)
    try:
        records = read_last_run(config.cache_dir)
    except OSError as error:
        fail(f"the records of earlier runs are not used: {error}")
    found = _read(config, records or ())
    if as_json:
        print_json({**asdict(found), "hit_rate": found.hit_rate})
    else:
        typer.echo(_markdown(found))
    if found.hit_rate < minimum_hit_rate:
        fail(f"hit rate {found.hit_rate:.1%}, and --minimum-hit-rate={minimum_hit_rate:g}")


def _read(config: ClientConfig, records: Sequence[ProcessRecord]) -> RunSummary:
    def total(name: str) -> float:
        return sum(float(record.stats.get(name, 0)) for record in records)

    misses = [each for record in records for each in record.misses]
    misses.sort(key=lambda each: -each[2])
    why = {}
    if misses:
        asked = [(description, trouble) for description, trouble, _ in misses[:_SHOWN]]
        try:
            namespace = Namespace(records[0].namespace)
            with server_of(replace(config, namespace=namespace)) as server:
                started_at = min(record.run_started_at for record in records)
                causes = causes_of(server, asked, started_at=started_at)
        except CacheError:
            causes = []  # the bill does not need the server
        why = {key: cause.text for cause in causes for key in cause.keys}
    return RunSummary(
        command=" ".join(records[0].argv) if records else "",
        hits=int(sum(total(f"hits_{source}") for source in _SOURCES)),
        misses=int(total("misses")),
        troubled=sum(trouble is not None for _, trouble, _ in misses),
        compile_seconds=total("compile_seconds"),
        saved_compile_seconds=total("saved_compile_seconds"),
        compiled=[
            Compiled(
                description.label or f"{description.key.kind} {description.key.fingerprint[:12]}",
                seconds,
                why.get(description.key, ""),
            )
            for description, _, seconds in misses
        ],
    )


def _markdown(found: RunSummary) -> str:
    lines = ["## graphstash", ""]
    if not (found.hits or found.compiled):
        return "\n".join([*lines, "The last run on this host did not use the cache.", ""])
    lines.append(
        f"`{shown(found.command.replace('`', ' '), most=200)}`: {plural(found.hits, 'hit')}, "
        f"{plural(found.misses, 'miss')} ({found.hit_rate:.0%} hits). It compiled for "
        f"{format_seconds(found.compile_seconds)}; the hits saved "
        f"{format_seconds(found.saved_compile_seconds)}.\n"
    )
    if found.compiled:
        rows = [
            (plain(each.label), format_seconds(each.seconds), plain(each.why) or "not known")
            for each in found.compiled[:_SHOWN]
        ]
        lines += ["### Compiled", "", *table(("program", "compiled", "why"), rows, numbers="-:-")]
        if (more := len(found.compiled) - _SHOWN) > 0:
            lines.append(f"And {plural(more, 'program')} more.\n")
    return "\n".join(lines)
