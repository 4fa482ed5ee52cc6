"""Garbage collection on demand: all that maintenance does, once, or a plan of it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from graphstash_server.actor import Actor
from graphstash_server.services.artifacts.eviction import OVER_SOFT_LIMIT
from graphstash_server.services.maintenance.reconciler import Lost, Orphan
from graphstash_server.services.maintenance.schedule import Candidate, Maintenance

__all__ = ["Chosen", "GarbageTotals", "GarbageWanted", "collect_garbage"]


class GarbageWanted(NamedTuple):
    """What to collect in addition to artifacts over a limit or past their retention.
    `is_confirmed` also evicts for a limit of less than half of what is stored.
    """

    is_dry_run: bool
    is_confirmed: bool
    unused_for: timedelta | None
    toolchain: str | None
    namespace: str | None
    blobs_before: datetime


class Chosen(NamedTuple):
    """An artifact to evict, and the reason."""

    reason: str
    candidate: Candidate


@dataclass(slots=True)
class GarbageTotals:
    """Numbers of removed objects; for a dry run, of objects that would be removed."""

    evicted: int = 0
    chosen_bytes: int = 0
    deleted: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    lost: int = 0


async def collect_garbage(
    wanted: GarbageWanted,
    *,
    actor: Actor,
    maintenance: Maintenance,
    found: Callable[[Chosen | Orphan | Lost], None],
) -> GarbageTotals:
    """Collect garbage, and call `found` for each object, of which there may be a million."""
    totals = GarbageTotals()
    evictor, collector = maintenance.evictor, maintenance.collector
    reconciler = maintenance.reconciler
    async for reason, page in _chosen(wanted, maintenance):
        for candidate in page:
            totals.evicted += 1
            totals.chosen_bytes += candidate.digest.size_bytes
            found(Chosen(reason, candidate))
        if not wanted.is_dry_run:
            await evictor.evict(page, actor=actor, reason=reason)
    if not wanted.is_dry_run:
        totals.evicted += await evictor.run(actor=actor, is_confirmed=wanted.is_confirmed)
        totals.deleted += await collector.collect_marked()
    async for odd in reconciler.compare(blobs_before=wanted.blobs_before):
        for each in odd if wanted.is_dry_run else await reconciler.remove(odd):
            found(each)
            if isinstance(each, Lost):
                totals.lost += 1
            else:
                totals.orphans += 1
                totals.orphan_bytes += each.digest.size_bytes
    if not wanted.is_dry_run:
        totals.deleted += await collector.collect_abandoned()
        await reconciler.drop_old_leases()
    return totals


async def _chosen(
    wanted: GarbageWanted, maintenance: Maintenance
) -> AsyncIterator[tuple[str, list[Candidate]]]:
    """Yield artifacts that are evicted even if there is room, by options and by the retention of
    the settings. For a dry run, also yield artifacts over the soft limits.
    """
    retention = maintenance.retention
    if wanted.unused_for is not None:
        async for page in retention.unused(wanted.unused_for, namespace=wanted.namespace):
            yield "unused", page
    if wanted.toolchain is not None:
        async for page in retention.of_toolchains(wanted.toolchain, namespace=wanted.namespace):
            yield "toolchain", page
    async for page in maintenance.retired():
        yield "retention", page
    if wanted.is_dry_run:
        async for candidate in maintenance.evictor.plan(is_confirmed=wanted.is_confirmed):
            yield OVER_SOFT_LIMIT, [candidate]
