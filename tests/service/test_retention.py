"""Which artifacts retention deletes, and what use and pins keep."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import sqlalchemy as sa

from graphstash_schema import ArtifactKind
from graphstash_server.actor import Actor
from graphstash_server.db.queries.artifacts import pin_artifacts, unpin_artifacts
from graphstash_server.db.tables import artifacts
from graphstash_server.services.maintenance.garbage import GarbageOptions, collect_garbage
from graphstash_server.testing.stores import as_chunks
from support.services import ACTOR, DAY, evicted, key_of, upload_of

pytestmark = pytest.mark.anyio

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.sql
async def test_artifacts_unused_for_retain_days_are_deleted(opened):
    async with opened(retain_days=30) as store:
        for number in range(4):
            await store.add(number)
        store.clock.turn(20 * DAY)
        await store.use(1)
        store.clock.turn(11 * DAY)
        assert await store.context.maintenance.retain() == 3
        assert await store.kept(4) == [1]
        assert len(store.blobs.blobs) == 1
        logged = sorted(await store.evictions())
        assert logged == sorted(evicted((0, 2, 3), "retention", by=Actor.server()))

        await collect_garbage(
            GarbageOptions(
                is_dry_run=False,
                is_confirmed=False,
                unused_for=timedelta(days=9),
                blobs_before=store.clock.now,
            ),
            actor=Actor.local(),
            maintenance=store.context.maintenance,
            found=lambda _: None,
        )
        assert (await store.evictions())[3:] == evicted([1], "unused", by=Actor.local())


@pytest.mark.sql
async def test_artifact_used_or_pinned_after_its_selection_stays(opened):
    async with opened() as store:
        await store.fill(4)
        store.clock.turn(20 * DAY)
        unused = store.context.retention.unused(timedelta(days=9))
        chosen = [each async for page in unused for each in page]
        assert len(chosen) == 4
        await store.use(1)
        await store.pin(2)
        assert await store.context.evictor.evict(chosen, actor=ACTOR, reason="unused") == 2
        assert await store.kept(4) == [1, 2]
        assert sorted(await store.evictions()) == sorted(evicted((0, 3), "unused"))


@pytest.mark.sql
async def test_pin_applies_to_no_other_kind_or_device_type_of_a_fingerprint(opened):
    until = START + timedelta(days=9)
    named = key_of(1)
    siblings = [named._replace(device_type="cuda-sm_90"), named._replace(kind=ArtifactKind.PJRT)]
    others = [("jax", "cuda-sm_90"), ("pjrt", "cpu")]
    columns = (artifacts.c.kind, artifacts.c.device_type, artifacts.c.pinned_until)

    async def pinned():
        async with store.context.database.reading() as connection:
            rows = await connection.execute(sa.select(*columns))
            return sorted((kind, device_type) for kind, device_type, at in rows if at == until)

    async with opened() as store:
        for key in (named, *siblings):
            await store.context.uploads.publish(upload_of(key, b"x"), as_chunks(b"x"))
        for change, found in (
            (partial(pin_artifacts, keys=[named], until=until), [("jax", "cpu")]),
            (
                partial(pin_artifacts, keys=siblings, until=until),
                [("jax", "cpu"), ("jax", "cuda-sm_90"), ("pjrt", "cpu")],
            ),
            (partial(unpin_artifacts, keys=[named]), others),
        ):
            async with store.context.database.writing() as connection:
                await change(connection)
            assert await pinned() == found


@pytest.mark.sql
async def test_latest_toolchains_are_retained(opened):
    async with opened(retain_toolchains=2) as store:
        for number, toolchain in enumerate(["torch 2.5", "torch 2.6", "torch 2.7", ""]):
            await store.add(number, toolchain=toolchain)
            store.clock.turn(1 * DAY)
        await store.use(0)  # a job uses 2.5 again
        assert await store.context.maintenance.retain() == 1
        assert await store.kept(4) == [0, 2, 3]
