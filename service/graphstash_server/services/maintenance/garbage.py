"""Garbage collection on demand: run all chores of maintenance once, or list what they remove."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_server.actor import Actor
from graphstash_server.services.artifacts.eviction import OVER_SOFT_LIMIT, Planned
from graphstash_server.services.maintenance.reconciler import Lost, Orphan
from graphstash_server.services.maintenance.schedule import Candidate, Maintenance

__all__ = ["Chosen", "GarbageOptions", "GarbageTotals", "collect_garbage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GarbageOptions:
    """What to collect in addition to artifacts over a limit or past their retention.
    `is_confirmed`: whether an operator has confirmed doubtful limits (`LimitDoubts`).
    """

    is_dry_run: bool
    is_confirmed: bool
    unused_for: timedelta | None = None
    toolchain: str | None = None
    namespace: str | None = None
    blobs_before: datetime


class Chosen(NamedTuple):
    """An artifact to evict, and the reason."""

    reason: str
    candidate: Candidate


@dataclass(slots=True)
class GarbageTotals:
    """Numbers of objects that were removed, or that a dry run would remove."""

    evicted: int = 0
    chosen_bytes: int = 0
    deleted: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    lost: int = 0


async def collect_garbage(
    options: GarbageOptions,
    *,
    actor: Actor,
    maintenance: Maintenance,
    found: Callable[[Chosen | Orphan | Lost], None],
) -> GarbageTotals:
    """Collect garbage, and call `found` for each object, of which there may be a million."""
    totals = GarbageTotals()
    evictor, collector = maintenance.evictor, maintenance.collector
    reconciler = maintenance.reconciler
    choose = _planned if options.is_dry_run else _chosen
    async for reason, page in choose(options, maintenance):
        for candidate in page:
            totals.evicted += 1
            totals.chosen_bytes += candidate.digest.size_bytes
            found(Chosen(reason, candidate))
        if not options.is_dry_run:
            await evictor.evict(page, actor=actor, reason=reason)
    if not options.is_dry_run:
        totals.evicted += await evictor.run(actor=actor, is_confirmed=options.is_confirmed)
        totals.deleted += await collector.collect_marked()
    async for odd in reconciler.compare(blobs_before=options.blobs_before):
        for each in odd if options.is_dry_run else await reconciler.remove(odd):
            found(each)
            if isinstance(each, Lost):
                totals.lost += 1
            else:
                totals.orphans += 1
                totals.orphan_bytes += each.digest.size_bytes
    if not options.is_dry_run:
        totals.deleted += await collector.collect_abandoned()
        await reconciler.drop_old_leases()
    return totals


async def _chosen(
    options: GarbageOptions, maintenance: Maintenance
) -> AsyncIterator[tuple[str, list[Candidate]]]:
    """Yield reasons and artifacts to evict even if there is room: by the options, and by the
    retention of the settings.
    """
    retention = maintenance.retention
    if options.unused_for is not None:
        async for page in retention.unused(options.unused_for, namespace=options.namespace):
            yield "unused", page
    if options.toolchain is not None:
        async for page in retention.of_toolchains(options.toolchain, namespace=options.namespace):
            yield "toolchain", page
    async for page in maintenance.find_retired():
        yield "retention", page


async def _planned(
    options: GarbageOptions, maintenance: Maintenance
) -> AsyncIterator[tuple[str, list[Candidate]]]:
    """Yield what a run would evict: each artifact once, under its first reason."""
    planned = Planned()
    async for reason, page in _chosen(options, maintenance):
        yield reason, [each for each in page if planned.add(each)]
    async for candidate in maintenance.evictor.plan(
        is_confirmed=options.is_confirmed, planned=planned
    ):
        yield OVER_SOFT_LIMIT, [candidate]
