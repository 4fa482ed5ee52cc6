"""The services of a server without HTTP, on a clock that a test advances, and a client's calls."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from graphstash_schema import (
    ArtifactKey,
    Digest,
    Grant,
    LeaseReply,
    LeaseRequest,
    Namespace,
    NamespacePolicy,
    NamespaceStats,
    TokenIssued,
    TokenRequest,
    WriteMode,
)
from graphstash_server.actor import Actor
from graphstash_server.context import ProcessContext, open_services, prepare_database
from graphstash_server.db.queries.usage import stored_bytes
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts import uploads
from graphstash_server.services.artifacts.uploads import Upload
from graphstash_server.services.identity.tokens import TokenService
from graphstash_server.services.jobs.leases import Acquisition
from graphstash_server.settings import load_settings
from graphstash_server.testing import MemoryBlobStore
from graphstash_server.testing.stores import as_chunks
from support.pins import pin_in

ACTOR = Actor("writer", "request-1")
TEAM = Namespace("team")
HOUR = 3600
DAY = 24 * HOUR
OVERWRITE = NamespacePolicy(mode=WriteMode.OVERWRITE)


class FakeClock:
    """A clock that a test advances, and a monotonic clock beside it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._passed_seconds = 0.0

    def __call__(self) -> datetime:
        return self.now

    def steady(self) -> float:
        return self._passed_seconds

    def turn(self, seconds: float) -> None:
        """Advance both clocks."""
        self._passed_seconds += seconds
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Set the clock forward or back without advancing the monotonic clock."""
        self.now += timedelta(seconds=seconds)


def key_of(number: int = 0, namespace: str = "team") -> StoredKey:
    fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
    return StoredKey.of(Namespace(namespace), ArtifactKey.parse("jax", "cpu", fingerprint))


def upload_of(
    key: StoredKey,
    blob: bytes,
    *,
    policy: NamespacePolicy = OVERWRITE,
    seconds: float = 1.0,
    toolchain: str = "",
) -> Upload:
    return Upload(
        key=key,
        digest=Digest.of(blob),
        metadata_header="",
        compile_seconds=seconds,
        toolchain=toolchain,
        only_if_absent=False,
        actor=ACTOR,
        policy=policy,
    )


async def new_token(tokens: TokenService, *, expires_at: datetime | None = None) -> TokenIssued:
    """Make a token that may read all namespaces."""
    grants = (Grant.parse("read:*"),)
    request = TokenRequest(description="a test", grants=grants, expires_at=expires_at)
    return await tokens.create(request, actor=ACTOR)


class ServiceClient:
    """The calls of a client to one server."""

    def __init__(self, context: ProcessContext, *, blobs: Any = None, clock: Any = None) -> None:
        self.context, self.blobs, self.clock = context, blobs, clock

    async def put(
        self, blob: bytes, number: int = 0, *, namespace: str = "team", **terms: Any
    ) -> bool:
        upload = upload_of(key_of(number, namespace), blob, **terms)
        return await self.context.uploads.publish(upload, as_chunks(blob))

    async def get(self, number: int = 0, namespace: str = "team") -> bytes | None:
        artifact = await self.context.artifacts.open(key_of(number, namespace))
        if artifact is None:
            return None
        try:
            size_bytes = artifact.reader.size_bytes
            return b"".join([chunk async for chunk in artifact.reader.chunks(0, size_bytes)])
        finally:
            await artifact.reader.close()

    async def pin(self, *numbers: int) -> None:
        """Pin artifacts without an end."""
        await pin_in(self.context.database, [key_of(number) for number in numbers])

    async def evict_one(self) -> bool:
        """Evict the artifact of least value, and its blob. Return False if all must stay."""
        async with self.context.database.reading() as connection:
            stored = await stored_bytes(connection)
        is_evicted = await self.context.evictor.shrink(
            None, goal_bytes=stored - 1, actor=ACTOR, reason="by this test"
        )
        await self.context.collector.collect_marked()
        return is_evicted > 0

    async def use(self, number: int = 0) -> None:
        """Count a hit, and flush the count to the database."""
        self.context.accounting.count_hit(key_of(number), saved_seconds=1)
        await self.context.accounting.flush()

    async def acquire(
        self,
        number: int = 0,
        caller: str = "caller",
        namespace: str = "team",
        *,
        wait_seconds: float = 0.0,
        **request: Any,
    ) -> LeaseReply:
        """Acquire a lease for a client that does not hang up."""
        key = key_of(number, namespace)
        wanted = Acquisition(key, LeaseRequest(**request), wait_seconds, caller)
        gone = asyncio.get_running_loop().create_future()
        return await self.context.leases.acquire(wanted, gone=gone)

    async def used(self, namespace: str = "team") -> NamespaceStats | None:
        stats = (await self.context.statistics.read()).namespaces
        return next((each for each in stats if each.namespace == namespace), None)

    @staticmethod
    def blob(number: int, size: int, namespace: str = "team") -> bytes:
        return f"{namespace} {number} ".encode().ljust(size, b".")[:size]

    async def add(
        self, number: int, size: int = 10_000, *, namespace: str = "team", **terms: Any
    ) -> None:
        terms |= {"policy": NamespacePolicy(), "namespace": namespace}
        await self.put(self.blob(number, size, namespace), number, **terms)

    async def fill(self, count: int) -> None:
        """Store artifacts of 10,000 bytes, in order of increasing value."""
        for number in range(count):
            await self.add(number, seconds=1 + number)

    async def look_up(self, *numbers: int, caller: str = "") -> int:
        """Return how many of the artifacts are found."""
        keys = [key_of(number) for number in numbers]
        found = await self.context.artifacts.lookup(TEAM, keys, caller=caller)
        return len(found.artifacts)

    async def evict(self, *, is_confirmed: bool = False) -> int:
        return await self.context.evictor.run(actor=Actor.server(), is_confirmed=is_confirmed)

    async def evictions(self) -> list[tuple[str, str, str]]:
        """Return artifact, reason and actor of each eviction in the audit log, oldest first."""
        entries = (await self.context.audit.read(limit=1000)).entries
        return [
            (entry.subject, entry.detail.rpartition(" ")[0], entry.actor)
            for entry in reversed(entries)
            if entry.action == "evict"
        ]

    async def collect(self) -> int:
        return await self.context.collector.collect_marked()

    async def has(self, number: int, namespace: str = "team") -> bool:
        return await self.context.artifacts.find(key_of(number, namespace)) is not None

    async def kept(self, count: int, namespace: str = "team") -> list[int]:
        return [number for number in range(count) if await self.has(number, namespace)]

    async def begin_deletion(self) -> tuple[asyncio.Event, asyncio.Task[int]]:
        """Start to delete marked blobs. Return the event that lets this end, and the task."""
        deleting, go_on = asyncio.Event(), asyncio.Event()
        delete = self.blobs.delete

        async def slow(digest: Any, **name: Any) -> None:
            deleting.set()
            await go_on.wait()
            await delete(digest, **name)

        self.blobs.delete = slow
        under_way = asyncio.create_task(self.collect())
        await deleting.wait()
        return go_on, under_way


def evicted(numbers: Any, reason: str, *, by: Actor = ACTOR) -> list[tuple[str, str, str]]:
    """Return what `ServiceClient.evictions` returns after these evictions."""
    return [(str(key_of(number).key), reason, by.name) for number in numbers]


def opener(directory: Path, database_url: str) -> Any:
    """Return a function that opens servers that share everything but the state of a process."""
    blobs = MemoryBlobStore()
    clock = FakeClock()

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[ServiceClient]:
        settings = load_settings(data_dir=directory, database_url=database_url, **options)
        await prepare_database(settings, is_migrating=True)
        async with open_services(
            settings, blob_store=blobs, clock=clock, steady=clock.steady
        ) as context:
            yield ServiceClient(context, blobs=blobs, clock=clock)

    opened.blobs = blobs  # type: ignore[attr-defined] # for tests
    opened.clock = clock  # type: ignore[attr-defined] # for tests
    return opened


def answer_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Answer each upload with 503 as soon as its blob is stored. The commit continues."""
    patch.setattr(uploads, "_STORE_SECONDS", 60.0)
    patch.setattr(uploads, "_DROP_SECONDS", -60.0)
