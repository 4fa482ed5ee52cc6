"""ManifestService records the artifacts of each job. PinService protects them from eviction."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import AuditAction, ManifestName, Namespace
from graphstash_schema.protocol import MAX_MANIFEST_ENTRIES
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Transaction
from graphstash_server.db.queries.artifacts import pin_artifacts, unpin_artifacts
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.costs import MANIFEST_ENTRY_BYTES
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.manifests import (
    StoredEntry,
    add_run,
    count_entries,
    drop_unused_entries,
    list_entries,
    list_unused,
    trim_entries,
)
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.allocation import Allocation, Allocator
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["ManifestService", "PinService", "StoredEntry"]

_UNUSED = timedelta(days=90)
"""Time since its last use after which an entry is deleted."""

_MAX_ENTRIES = 16 * MAX_MANIFEST_ENTRIES
"""Maximum entries of one namespace: 16 full manifests, or hundreds of usual ones."""


@dataclass(kw_only=True, eq=False)
class ManifestService:
    """Read and update manifests. Safe for concurrent calls.

    Entries count against the byte limits. A full manifest or namespace keeps entries of all writers
    in turn, the most recently used first.
    """

    database: Database
    allocator: Allocator
    clock: PlausibleClock

    async def get(self, namespace: Namespace, name: ManifestName) -> list[StoredEntry]:
        """Return the entries of a manifest, if any, most recently used first."""
        return await list_entries(self.database, namespace, name)

    async def merge(
        self,
        namespace: Namespace,
        name: ManifestName,
        keys: Sequence[StoredKey],
        *,
        writer: str,
        actor: Actor,
    ) -> tuple[list[StoredEntry], bool]:
        """Add the keys that one run of `writer` used. Return the entries of the manifest, and
        whether it is new. If the entries need space, evict artifacts on behalf of `actor`, or raise
        NoSpaceError.
        """
        unique = list(dict.fromkeys(keys))
        known = {entry.name for entry in await list_entries(self.database, namespace, name)}
        more = sum((key.kind, key.device_type, key.fingerprint) not in known for key in unique)
        allocation = Allocation(
            namespace, blob_bytes=0, row_bytes=more * MANIFEST_ENTRY_BYTES, actor=actor
        )
        await self.allocator.check(allocation)
        with self.allocator.releasing(allocation):
            await self.allocator.take(allocation, allocation.row_bytes)
            async with self.database.writing_in_steps() as steps:
                run = partial(_merge, name=name, keys=unique, writer=writer, now=self.clock())
                return await steps.run(run, is_last=True)

    async def drop_unused(self) -> None:
        """Delete every entry that no run has used for `_UNUSED`, in all namespaces."""
        before = self.clock.ago(_UNUSED)
        async with self.database.reading() as connection:
            namespaces = await list_unused(connection, before=before)
        for namespace in namespaces:
            async with self.database.writing() as connection:
                dropped = await drop_unused_entries(connection, namespace, before=before)
                await _count(connection, namespace, -dropped)


async def _merge(
    connection: Transaction,
    *,
    name: ManifestName,
    keys: Sequence[StoredKey],
    writer: str,
    now: datetime,
) -> tuple[list[StoredEntry], bool]:
    namespace = keys[0].namespace
    await lock_name(connection, f"manifests {namespace}")
    before = await count_entries(connection, namespace)
    is_new = not await count_entries(connection, namespace, name)
    await add_run(connection, name, keys, writer=writer, now=now)
    await trim_entries(connection, namespace, name, keep=MAX_MANIFEST_ENTRIES)
    await trim_entries(connection, namespace, keep=_MAX_ENTRIES)
    added = await count_entries(connection, namespace) - before
    await _count(connection, namespace, added)
    return await list_entries(connection, namespace, name), is_new


async def _count(connection: Transaction, namespace: str, more: int) -> None:
    if more:
        change = UsageChange(manifest_bytes=more * MANIFEST_ENTRY_BYTES)
        await add_usage(connection, namespace, change)


@dataclass(kw_only=True, eq=False)
class PinService:
    """Protect the artifacts of a job from eviction. Only `unpin` shortens a pin."""

    database: Database
    clock: Clock

    async def pin(
        self, namespace: Namespace, job: ManifestName, *, until: datetime, actor: Actor
    ) -> int:
        """Pin the artifacts in a job's manifest. Return the number of entries."""
        change = partial(pin_artifacts, until=until)
        record = self._record(actor, namespace, job, f"pinned until {until:%Y-%m-%d}")
        return await self._change(namespace, job, change, record)

    async def unpin(self, namespace: Namespace, job: ManifestName, *, actor: Actor) -> int:
        """Unpin the artifacts in a job's manifest. Return the number of entries."""
        record = self._record(actor, namespace, job, "not pinned")
        return await self._change(namespace, job, unpin_artifacts, record)

    def _record(self, actor: Actor, namespace: Namespace, job: str, detail: str) -> AuditRecord:
        # Earlier releases cannot show a log with an unknown action.
        action = AuditAction.POLICY_SET
        subject = f"job {job}"
        return AuditRecord(self.clock(), actor, action, namespace, subject=subject, detail=detail)

    async def _change(
        self,
        namespace: Namespace,
        job: ManifestName,
        change: Callable[[AsyncConnection, Sequence[StoredKey]], Awaitable[None]],
        record: AuditRecord,
    ) -> int:
        entries = await list_entries(self.database, namespace, job)
        keys = [
            StoredKey.parse(
                namespace=namespace,
                kind=entry.kind,
                device_type=entry.device_type,
                fingerprint=entry.fingerprint,
            )
            for entry in entries
        ]
        async with self.database.writing() as connection:
            if keys:
                await change(connection, keys)
                await add_audit(connection, [record])
        return len(keys)
