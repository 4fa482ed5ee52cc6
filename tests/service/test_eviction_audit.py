"""Who evicted what, and why, is in the audit log, whatever made it necessary."""

from datetime import timedelta

import pytest

from graphstash_schema import ManifestName, Namespace, NamespacePolicy
from graphstash_server.actor import Actor
from graphstash_server.errors import NoSpaceError
from graphstash_server.services.maintenance.garbage import GarbageWanted, collect_garbage
from support.services import ACTOR, ServiceClient, key_of

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

SERVER = Actor.server()
FREE = NamespacePolicy()


async def evictions(context):
    """(actor, request, namespace, subject, reason) of each, oldest first."""
    entries = (await context.audit.read(limit=100)).entries
    return [
        (entry.actor, entry.request_id, entry.namespace, entry.subject, why)
        for entry in reversed(entries)
        if entry.action == "evict"
        for why in [entry.detail.rpartition(" ")[0]]
    ]


def evicted(number, why, *, by=ACTOR, namespace="team"):
    return (by.name, by.request_id, namespace, str(key_of(number).key), why)


async def put(context, number, *, namespace="team"):
    blob = f"{namespace} {number}".encode().ljust(20_000)
    await ServiceClient(context).put(
        blob, number, namespace=namespace, policy=FREE, seconds=number + 1
    )


async def test_an_upload_onto_a_full_disk_is_named_with_what_it_evicted(opened, monkeypatch):
    async with opened() as server:
        context = server.context
        await put(context, 0)
        await put(context, 1, namespace="other")
        answers = iter([None, 25_000])  # it fits when it is announced, and not when it arrives

        async def full(_):
            missing = next(answers, None)
            return missing and NoSpaceError("no space left", limit=0, missing_bytes=missing)

        monkeypatch.setattr(opened.blobs, "full", full)
        await put(context, 2)
        assert await evictions(context) == [
            evicted(0, "the disk is full"),
            evicted(1, "the disk is full", namespace="other"),
        ]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"store_limit_bytes": 50_000}, "over the store's limit"),
        ({"namespace_limit_bytes": 50_000}, "over the namespace's limit"),
    ],
)
async def test_an_upload_over_a_limit_is_named_with_what_it_evicted(opened, limits, why):
    async with opened(**limits) as server:
        for number in range(3):
            await put(server.context, number)
        assert await evictions(server.context) == [evicted(0, why)]


async def test_a_manifest_that_needs_room_is_named_with_what_it_evicted(opened):
    async with opened(namespace_limit_bytes=50_000) as server:
        for number in range(2):
            await put(server.context, number)
        keys = [key_of(number) for number in range(30)]
        await server.context.manifests.merge(
            Namespace("team"), ManifestName("nightly"), keys, writer="", actor=ACTOR
        )
        assert await evictions(server.context) == [evicted(0, "over the namespace's limit")]


async def test_the_server_itself_is_named_for_the_soft_limit_and_for_retention(opened):
    async with opened(soft_limit_bytes=50_000, retain_days=30) as server:
        context = server.context
        for number in range(3):
            await put(context, number)
        await context.evictor.run(actor=SERVER)
        opened.clock.turn(timedelta(days=31).total_seconds())
        await context.maintenance.retain()
        assert await evictions(context) == [
            evicted(0, "over the soft limit", by=SERVER),
            evicted(1, "retention", by=SERVER),
            evicted(2, "retention", by=SERVER),
        ]


async def test_gc_is_named_with_what_it_evicted(opened):
    async with opened() as server:
        context, user = server.context, Actor.local()
        await put(context, 0)
        opened.clock.turn(60)
        await collect_garbage(
            GarbageWanted(False, timedelta(seconds=30), None, None, opened.clock.now),
            actor=user,
            maintenance=context.maintenance,
            found=lambda _: None,
        )
        assert await evictions(context) == [evicted(0, "unused", by=user)]
