"""`graphstash gc`: evicts, deletes and tidies now, or says what would go."""

import json
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from graphstash_server.commands.running import parse_age, run_with_services, size_of

if TYPE_CHECKING:
    from graphstash_server.context import ProcessContext
    from graphstash_server.services.retention import Candidate

__all__ = ["gc"]


class _Wanted(NamedTuple):
    """What the options ask for."""

    is_dry_run: bool
    is_json: bool
    unused_for: timedelta | None
    toolchain: str | None
    namespace: str | None
    orphan_age: timedelta


def gc(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would go, and change nothing.")
    ] = False,
    unused_for: Annotated[
        str | None, typer.Option(help="Evict what nobody used for so long, e.g. 90d, 12h.")
    ] = None,
    toolchain: Annotated[
        str | None,
        typer.Option(help="Evict artifacts whose toolchain fits a pattern, e.g. '*torch 2.6*'."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Let the two options above choose only in this namespace.")
    ] = None,
    orphans_older_than: Annotated[
        str,
        typer.Option(help="Age of a blob that no artifact has; a younger one may be an upload."),
    ] = "1h",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, for scripts.")
    ] = False,
) -> None:
    """Collect garbage: enforce limits and retention, delete what is marked, find orphans.

    The servers do this by themselves. Run it with the settings of a server, while they serve.
    """
    wanted = _Wanted(
        is_dry_run=dry_run,
        is_json=as_json,
        unused_for=parse_age(unused_for) if unused_for else None,
        toolchain=toolchain,
        namespace=namespace,
        orphan_age=parse_age(orphans_older_than),
    )
    run_with_services(lambda context: _collect(context, wanted))


async def _collect(context: "ProcessContext", wanted: _Wanted) -> None:
    from graphstash_server.clock import system_clock
    from graphstash_server.services.tidy import Orphan

    report = _Report(wanted)
    async for reason, page in _chosen(context, wanted):
        report.add_artifacts(reason, page)
        if not wanted.is_dry_run:
            await context.evictor.evict(page)
    if wanted.is_dry_run:
        async for candidate in context.evictor.plan():
            report.add_artifacts("over the soft limit", [candidate])
    else:
        report.evicted += await context.evictor.run()
        report.deleted += await context.keeper.collect_marked()
    async for found in context.tidy.compare(blobs_before=system_clock() - wanted.orphan_age):
        if isinstance(found, Orphan):
            if wanted.is_dry_run or await context.keeper.collect(found.digest):
                report.add_orphan(str(found.digest), found.digest.size_bytes)
        else:
            report.add_lost(found.artifact.key.artifact_path)
            if not wanted.is_dry_run:
                await context.artifacts.heal(found.artifact)
    if not wanted.is_dry_run:
        report.deleted += await context.keeper.collect_abandoned()
        await context.tidy.drop_old_leases()
    report.finish()


async def _chosen(
    context: "ProcessContext", wanted: _Wanted
) -> "AsyncIterator[tuple[str, list[Candidate]]]":
    """What goes whatever room there is: by option, and by the retention that is set."""
    if wanted.unused_for is not None:
        async for page in context.retention.unused(wanted.unused_for, namespace=wanted.namespace):
            yield "unused", page
    if wanted.toolchain is not None:
        chosen = context.retention.of_toolchains(wanted.toolchain, namespace=wanted.namespace)
        async for page in chosen:
            yield "toolchain", page
    async for page in context.maintenance.outlived():
        yield "retention", page


class _Report:
    """Prints while it goes on: there may be a million lines."""

    def __init__(self, wanted: _Wanted) -> None:
        self._wanted = wanted
        self.evicted = 0
        self.deleted = 0
        self._chosen_bytes = 0
        self._orphans = 0
        self._orphan_bytes = 0
        self._lost = 0

    def add_artifacts(self, reason: str, page: "list[Candidate]") -> None:
        for candidate in page:
            self.evicted += 1
            self._chosen_bytes += candidate.digest.size_bytes
            if self._wanted.is_json:
                record = {
                    "artifact": candidate.key.artifact_path,
                    "reason": reason,
                    "size_bytes": candidate.digest.size_bytes,
                    "compile_seconds": candidate.compile_seconds,
                    "toolchain": candidate.toolchain,
                    "last_used_at": candidate.last_used_at.isoformat(),
                }
                self._print(json.dumps(record))
            elif self._wanted.is_dry_run:
                self._print(
                    f"{reason:>19}  {size_of(candidate.digest.size_bytes):>9}  "
                    f"{candidate.compile_seconds:8.1f} s  {candidate.last_used_at:%Y-%m-%d %H:%M}  "
                    f"{candidate.key.artifact_path}"
                )

    def add_orphan(self, digest: str, size_bytes: int) -> None:
        self._orphans += 1
        self._orphan_bytes += size_bytes
        if self._wanted.is_json:
            self._print(json.dumps({"orphan": digest, "size_bytes": size_bytes}))
        elif self._wanted.is_dry_run:
            self._print(f"{'no artifact has it':>19}  {size_of(size_bytes):>9}  {digest}")

    def add_lost(self, path: str) -> None:
        self._lost += 1
        if self._wanted.is_json:
            self._print(json.dumps({"lost": path}))
        elif self._wanted.is_dry_run:
            self._print(f"{'its blob is lost':>19}  {path}")

    def finish(self) -> None:
        if self._wanted.is_json:
            return
        would = "would be " if self._wanted.is_dry_run else ""
        lines = [f"{self.evicted} artifacts {would}evicted"]
        if self._wanted.is_dry_run:
            lines[0] += f" ({size_of(self._chosen_bytes)})"
        else:
            lines.append(f"{self.deleted} blobs deleted")
        lines.append(
            f"{self._orphans} blobs without an artifact ({size_of(self._orphan_bytes)}) and "
            f"{self._lost} artifacts without a blob {would}removed"
        )
        self._print("; ".join(lines))

    @staticmethod
    def _print(line: str) -> None:
        sys.stdout.write(line + "\n")
