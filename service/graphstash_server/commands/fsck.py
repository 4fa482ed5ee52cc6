"""`graphstash fsck`: check the database, and that rows, blobs and counters agree."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_server.commands.running import (
    JsonLines,
    OrphanAge,
    format_bytes,
    parse_age,
    plural,
    progress_bar,
    run_with_services,
)

if TYPE_CHECKING:
    from datetime import timedelta

    from graphstash_server.context import ProcessContext

__all__ = ["fsck"]

_FOUND_SOMETHING = 1


def fsck(
    *,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Drop artifacts whose blob is lost or damaged, delete orphans, recount.",
        ),
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every blob and compare its SHA-256.")
    ] = False,
    orphans_older_than: OrphanAge = "1h",
    as_json: JsonLines = False,
) -> None:
    """Check the database, and that artifacts and blobs match.

    Exits with 1 if a problem remains. Can run while servers run. Does not repair a corrupt
    database: restore a backup.
    """
    age = parse_age(orphans_older_than)
    run_with_services(
        lambda context: _check(context, age=age, is_repair=repair, is_deep=deep, is_json=as_json)
    )


async def _check(
    context: "ProcessContext", *, age: "timedelta", is_repair: bool, is_deep: bool, is_json: bool
) -> None:
    from graphstash_server.errors import CorruptDatabaseError

    total_bytes = 0
    with suppress(CorruptDatabaseError):  # the check below reports it
        if is_deep:
            namespaces = (await context.statistics.read()).namespaces
            total_bytes = sum(namespace.size_bytes for namespace in namespaces)
        await context.plausible_clock.observe()
    found = 0
    with progress_bar("checking", is_shown=is_deep) as advance:
        async for finding in context.reconciler.check(
            blobs_before=context.plausible_clock.ago(age),
            is_deep=is_deep,
            is_repair=is_repair,
            checked=lambda size_bytes: advance(size_bytes, total_bytes),
        ):
            found += 1
            if is_json:
                typer.echo(json.dumps(finding._asdict()))
            else:
                size = format_bytes(finding.size_bytes)
                typer.echo(f"{finding.problem:>10}  {size:>9}  {finding.name}")
    is_repaired = is_repair and context.database.corruption is None
    if not is_json:
        done = " and repaired" if is_repaired and found else ""
        typer.echo(f"{plural(found, 'problem')} found{done}")
    if found and not is_repaired:
        raise SystemExit(_FOUND_SOMETHING)
