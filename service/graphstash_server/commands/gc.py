"""`graphstash gc`: collect garbage, or list what it would remove."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from graphstash_server.actor import Actor
from graphstash_server.commands.running import (
    JsonLines,
    OrphanAge,
    format_bytes,
    parse_age,
    plural,
    run_with_services,
)

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext
    from graphstash_server.services.maintenance.garbage import Chosen
    from graphstash_server.services.maintenance.reconciler import Lost, Orphan

__all__ = ["gc"]


def gc(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="List what would be removed.")
    ] = False,
    evict_now: Annotated[
        bool,
        typer.Option(
            "--evict-now", help="Evict even if a limit is below half of the stored bytes."
        ),
    ] = False,
    unused_for: Annotated[
        str | None, typer.Option(help="Evict artifacts not used for this long, e.g. 90d, 12h.")
    ] = None,
    toolchain: Annotated[
        str | None,
        typer.Option(help="Evict artifacts whose toolchain matches a pattern, e.g. `*torch 2.6*`."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Restrict --unused-for and --toolchain to this namespace."),
    ] = None,
    orphans_older_than: OrphanAge = "1h",
    as_json: JsonLines = False,
) -> None:
    """Collect garbage: enforce limits and retention, delete marked blobs and orphans.

    Servers do this periodically. Run it on a host of the server, with its `GRAPHSTASH_*`
    variables. Servers may run meanwhile. If most blobs are orphans, servers keep them and this
    command deletes them. It deletes nothing while the clock is implausible; see `graphstash clock`.
    """
    age = parse_age(unused_for) if unused_for else None
    orphan_age = parse_age(orphans_older_than)

    def found(each: "Chosen | Orphan | Lost") -> None:
        if as_json:
            typer.echo(json.dumps(_record(each)))
        elif dry_run:
            typer.echo(_line(each))

    async def work(context: "ProcessContext") -> None:
        from rich.console import Console

        from graphstash_server.services.maintenance.garbage import GarbageOptions, collect_garbage

        if dry_run:
            await context.plausible_clock.observe()
        else:
            await context.plausible_clock.require()
        blobs_before = context.plausible_clock.ago(orphan_age)
        with Console(stderr=True).status("collecting garbage"):
            totals = await collect_garbage(
                GarbageOptions(
                    is_dry_run=dry_run,
                    is_confirmed=evict_now,
                    unused_for=age,
                    toolchain=toolchain,
                    namespace=namespace,
                    blobs_before=blobs_before,
                ),
                actor=Actor.local(),
                maintenance=context.maintenance,
                found=found,
            )
        if as_json:
            return
        evicted = plural(totals.evicted, "artifact")
        if dry_run:
            evicted += f" would be evicted ({format_bytes(totals.chosen_bytes)})"
        else:
            evicted += f" evicted; {plural(totals.deleted, 'blob')} deleted"
        typer.echo(
            f"{evicted}; {plural(totals.orphans, 'blob')} without an artifact "
            f"({format_bytes(totals.orphan_bytes)}) and {plural(totals.lost, 'artifact')} without "
            f"a blob {'would be ' if dry_run else ''}removed"
        )
        if evict_now and not totals.evicted:
            is_over = await context.maintenance.evictor.find_exceeded(is_confirmed=True)
            typer.echo(
                "a limit is exceeded, but the other artifacts are pinned, withheld, or were "
                "looked up recently"
                if is_over
                else "nothing exceeds a limit that is set here: run this with the GRAPHSTASH_* "
                "variables of the server, which set its limits",
                err=True,
            )

    run_with_services(work)


def _record(found: "Chosen | Orphan | Lost") -> dict[str, object]:
    from graphstash_server.services.maintenance.reconciler import Lost, Orphan

    if isinstance(found, Orphan):
        return {"orphan": str(found.digest), "size_bytes": found.digest.size_bytes}
    if isinstance(found, Lost):
        return {"lost": found.artifact.key.artifact_path}
    candidate = found.candidate
    return {
        "artifact": candidate.key.artifact_path,
        "reason": found.reason,
        "size_bytes": candidate.digest.size_bytes,
        "compile_seconds": candidate.compile_seconds,
        "toolchain": candidate.toolchain,
        "last_used_at": candidate.last_used_at.isoformat(),
    }


def _line(found: "Chosen | Orphan | Lost") -> str:
    from graphstash_server.services.maintenance.reconciler import Lost, Orphan

    if isinstance(found, Orphan):
        size = format_bytes(found.digest.size_bytes)
        return f"{'no artifact has it':>19}  {size:>9}  {found.digest}"
    if isinstance(found, Lost):
        return f"{'its blob is lost':>19}  {found.artifact.key.artifact_path}"
    candidate = found.candidate
    return (
        f"{found.reason:>19}  {format_bytes(candidate.digest.size_bytes):>9}  "
        f"{candidate.compile_seconds:8.1f} s  {candidate.last_used_at:%Y-%m-%d %H:%M}  "
        f"{candidate.key.artifact_path}"
    )
