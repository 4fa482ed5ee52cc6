"""A million artifacts cost no more than a thousand: whatever is asked often, or in a loop, goes by
an index. The figures are in `make bench` (million)."""

import asyncio
import shutil
import tracemalloc

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from graphstash_schema import ArtifactKey, LeaseRequest, Namespace
from graphstash_schema.explanation import Description
from graphstash_schema.listing import ArtifactQuery
from graphstash_server.actor import Actor
from graphstash_server.clock import system_clock
from graphstash_server.context import open_services, prepare_database
from graphstash_server.errors import NoSpaceError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.allocation import Allocation
from graphstash_server.services.jobs.leases import Acquisition
from graphstash_server.settings import load_settings
from graphstash_server.testing.stores import as_chunks
from support.filling import BLOB_BYTES, fill, fingerprint
from support.services import ACTOR, upload_of
from support.statements import recorded

COUNT = 20_000
BENCH = Namespace("bench")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def filled(request, tmp_path_factory):
    """Settings of a server with many artifacts, all in one namespace."""
    directory = tmp_path_factory.mktemp("filled")
    url = f"sqlite:///{directory / 'graphstash.sqlite3'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    settings = settings_of(directory, url)
    asyncio.run(prepare_database(settings, is_migrating=True))
    fill(settings.database_url, directory, COUNT)
    return settings


@pytest.fixture
async def context(filled):
    async with open_services(filled, blob_store=None, clock=system_clock) as context:
        yield context


@pytest.fixture
def own(request, filled, tmp_path):
    """The same for a test that evicts: a copy."""
    directory = tmp_path / "own"
    shutil.copytree(filled.data_dir, directory)
    url = make_url(filled.database_url)
    if url.get_backend_name() == "postgresql":
        new = request.getfixturevalue("postgres").new_database(template=url.database)
    else:
        new = f"sqlite:///{directory / 'graphstash.sqlite3'}"
    return settings_of(directory, new)


def settings_of(directory, url):
    return load_settings(
        data_dir=directory,
        database_url=url,
        min_free_bytes=0,
        soft_limit_bytes=COUNT * BLOB_BYTES // 2,
    )


def key(number):
    return StoredKey.of(BENCH, ArtifactKey.parse("torch_xla", "cpu-bench", fingerprint(number)))


async def plans_of(database, statements):
    """How statements are executed; on PostgreSQL: whether each can do without reading everything,
    which it may prefer for a table as small as this one."""
    explain = "EXPLAIN " if database.is_postgresql else "EXPLAIN QUERY PLAN "
    plans = {}
    async with database._writing.begin() as connection:
        if database.is_postgresql:
            await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            raw = await connection.get_raw_connection()
        for sql, parameters in statements:
            if database.is_postgresql:  # parameters as the driver takes them, arrays included
                rows = await raw.driver_connection.fetch(explain + sql, *parameters)
            else:
                rows = await connection.exec_driver_sql(explain + sql, tuple(parameters))
            plans[sql] = "\n".join(str(row[-1]) for row in rows)
    for sql, plan in plans.items():
        assert not reads_everything(plan), f"{sql[:500]}\n{plan[:900]}"
    return plans


def reads_everything(plan):
    """SQLite says SCAN <table> for it, and USING INDEX when only the index is walked; a walk along
    an index that a LIMIT ends is what paging is."""
    for line in plan.splitlines():
        if "Seq Scan on artifacts" in line:
            return True
        if line.startswith("SCAN artifacts") and "INDEX" not in line:
            return True
    return False


async def test_hot_queries_use_an_index(context):
    with recorded("artifacts") as statements:
        artifact = await context.artifacts.open(key(7))
        await artifact.reader.close()
        await context.artifacts.find(key(8))
        asked = [key(number) for number in range(0, COUNT, 20)]
        found = await context.artifacts.lookup(BENCH, asked, caller="")
        assert len(found.artifacts) == len(asked)
        context.accounting.count_hit(key(7), saved_seconds=1)
        await context.accounting.flush()
        await context.uploads.publish(upload_of(key(COUNT), b"new"), as_chunks(b"new"))
        await context.leases.acquire(
            Acquisition(key(COUNT + 9), LeaseRequest(), 0.0, "somebody"),
            gone=asyncio.get_running_loop().create_future(),
        )
        await context.artifacts.delete(key(9), actor=ACTOR)
        allocation = Allocation(BENCH, blob_bytes=2**60, row_bytes=0, actor=ACTOR)
        with pytest.raises(NoSpaceError):
            await context.allocator.check(allocation)
    assert len(await plans_of(context.database, statements)) > 6


@pytest.mark.parametrize(
    ("order", "index"),
    [
        ("fingerprint", "artifacts"),
        ("newest", "ix_artifacts_namespace_created_at"),
        ("size", "ix_artifacts_by_size"),
    ],
)
async def test_artifact_listing_follows_an_index(context, order, index):
    """Nothing is sorted but what was stored at the same moment or has the same size."""
    query = ArtifactQuery(order=order, limit=10)
    first = await context.listing.list_artifacts(BENCH, query)
    with recorded("artifacts") as statements:
        after = query.model_copy(update={"after": first.next, "device_type": "cuda-sm_90"})
        await context.listing.list_artifacts(BENCH, after)
    plans = await plans_of(context.database, statements)
    assert len(plans) == 2
    for plan in plans.values():
        assert "TEMP B-TREE FOR ORDER BY" not in plan, plan
        assert index in plan, plan


async def test_dashboard_queries_use_an_index_and_are_bounded(context):
    """No statement reads all artifacts, and none returns more than people look at."""
    where = [BENCH, *(Namespace(f"other-{number}") for number in range(20))]
    with recorded() as statements:
        latest = await context.catalog.latest(where, limit=10)
        found = await context.catalog.search(where, fingerprint(7)[:8])
        texts = await context.catalog.search(where, "torch 2.3")
        details = await context.catalog.find(key(7))
        await context.statistics.read()
        await context.leases.list_held(where, limit=10)
    plans = await plans_of(context.database, statements)
    assert len(latest) == 10
    assert latest == sorted(latest, key=lambda entry: entry.artifact.created_at, reverse=True)
    assert key(7) in [entry.artifact.key for entry in found]
    assert 0 < len(texts) <= 50
    assert details is not None
    assert len(plans) > 6
    listing = next(plan for sql, plan in plans.items() if "created_at DESC" in sql)
    assert "ix_artifacts_namespace_created_at" in listing


async def test_explanation_of_new_program_reads_oldest_and_latest_artifacts(context):
    """To count how many of a million are without a description takes a fifth of a second."""
    wanted = Description(
        key=key(COUNT + 1).key, label="new", program={"program": "new"}, environment={}
    )
    with recorded() as statements:
        answer = await context.explanations.explain(BENCH, wanted, readable=[BENCH])
    plans = await plans_of(context.database, statements)
    assert answer.undescribed == 500
    assert plans[statements[-1].sql].count("ix_artifacts_namespace_created_at") == 2


async def test_explanation_of_moved_line_follows_indexes(context):
    """Neighboring labels come from the index of labels, and removals from that of the audit log."""
    wanted = Description(key=key(COUNT + 1).key, label="train.py:7", program={}, environment={})
    with recorded() as statements:
        await context.explanations.explain(BENCH, wanted, readable=[BENCH])
    plans = await plans_of(context.database, statements)
    near = [plan for sql, plan in plans.items() if "ORDER BY descriptions.label" in sql]
    (removals,) = (plan for sql, plan in plans.items() if "audit" in sql)
    assert len(near) == 2
    for plan in near:
        assert "ix_descriptions_namespace_kind_label_described_at" in plan, plan
    assert "ix_audit_namespace_id" in removals, removals


async def test_eviction_follows_the_index_of_value(context):
    with recorded("ORDER BY artifacts.rank") as statements:
        planned = [candidate async for candidate in context.evictor.plan()]
    ranks = [candidate.eviction_rank for candidate in planned]
    assert ranks == sorted(ranks)
    assert len(planned) > COUNT // 2
    plans = await plans_of(context.database, statements)
    assert plans
    assert all("ix_artifacts_rank" in plan for plan in plans.values()), plans


@pytest.mark.extended
async def test_an_eviction_takes_the_memory_of_a_page(own):
    """Eleven thousand artifacts go; what one of them needs is some kilobytes."""
    async with open_services(own, blob_store=None, clock=system_clock) as context:
        tracemalloc.start()
        evicted = await context.evictor.run(actor=Actor.server())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        async with context.database.reading() as connection:
            left = await connection.scalar(text("SELECT count(*) FROM artifacts"))
    assert evicted > COUNT // 2
    assert left * BLOB_BYTES <= COUNT * BLOB_BYTES // 2
    print(f"{evicted} artifacts were evicted with {peak / 1e6:.1f} MB at most")
    assert peak < 8 * 1024**2
