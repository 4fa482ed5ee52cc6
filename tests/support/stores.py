"""A store with limits on its size, for tests of what leaves it, and when."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from graphstash_schema import Namespace, NamespacePolicy
from graphstash_server.actor import Actor
from support.services import ACTOR, ServiceClient, key_of

TEAM = Namespace("team")
HOUR = 3600
DAY = 24 * HOUR


class Store(ServiceClient):
    """A client of one server that stores artifacts of chosen sizes."""

    def __init__(self, context: Any, opened: Any) -> None:
        super().__init__(context)
        self.blobs = opened.blobs
        self.clock = opened.clock

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
    """Return what `Store.evictions` returns after these evictions."""
    return [(str(key_of(number).key), reason, by.name) for number in numbers]


def opener_of_stores(opened: Any) -> Callable[..., Any]:
    """Open the services of a server. Two servers share everything except the state of a process."""

    @asynccontextmanager
    async def make(**limits: Any) -> AsyncIterator[Store]:
        async with opened(**limits) as server:
            yield Store(server.context, opened)

    return make
