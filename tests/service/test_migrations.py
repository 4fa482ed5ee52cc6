"""Every revision of the database, on SQLite and PostgreSQL: upgrades from an empty and from a
filled database, downgrades, and agreement with the tables.
"""

import asyncio
import json
import logging
import subprocess
import sys
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy as sa
from alembic import command

from graphstash_schema import ArtifactMetadata
from graphstash_server.context import prepare_database
from graphstash_server.db import migrate as migration
from graphstash_server.db.engine import make_engine
from graphstash_server.db.migrate import alembic_config, find_revision, migrate, newest_revision
from graphstash_server.db.tables import metadata
from graphstash_server.errors import StartError
from graphstash_server.eviction_order import aged, density
from graphstash_server.settings import load_settings
from support.database_sessions import connected
from support.postgres import EMPTY
from support.tiers import most_extended

pytestmark = pytest.mark.sql

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new_database(template=EMPTY)
    directory = tmp_path / "a directory"
    directory.mkdir()
    return f"sqlite+aiosqlite:///{directory / '100% of it.sqlite3'}"


@pytest.fixture
def config(url):
    return alembic_config(url)


def on(url, work):
    """Run synchronous work in one transaction."""

    async def run():
        engine = make_engine(sa.make_url(url))
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        finally:
            await engine.dispose()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "url", most_extended(["sqlite", "postgresql"], quick=["postgresql"]), indirect=True
)
def test_servers_that_start_at_once_migrate_one_after_another(url, tmp_path):
    """Each server has its own lock file, as on different hosts."""
    program = (
        "import sys; from pathlib import Path; from graphstash_server.db.migrate import migrate;"
        "migrate(sys.argv[1], lock_path=Path(sys.argv[2]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, url, str(tmp_path / f"lock-{number}")])
        for number in range(2)
    ]

    assert [process.wait(120) for process in processes] == [0, 0]
    assert asyncio.run(find_revision(url)) == newest_revision()


def fill(connection, count):
    """Add artifacts and counters in the form of the first revision."""
    now = NOW.replace(tzinfo=None) if connection.dialect.name == "sqlite" else NOW
    artifacts, usage = (
        sa.Table(name, sa.MetaData(), autoload_with=connection) for name in ("artifacts", "usage")
    )
    rows = [
        {
            "namespace": "team",
            "fingerprint": f"{number:064x}",
            "kind": "jax",
            "device_type": "cpu",
            "sha256": f"{number // 2:064x}",
            "size_bytes": 5000 + number,
            "metadata_header": ArtifactMetadata(
                compile_seconds=1.5 + number, raw_size_bytes=10, toolchain=f"jax 0.{number % 3}"
            ).to_header(),
            "compile_seconds": 1.5 + number,
            "created_at": now,
            "last_used_at": now,
            "hits": number,
            "pinned_until": None,
        }
        for number in range(count)
    ]
    rows[0]["metadata_header"] = ""
    connection.execute(artifacts.insert(), rows)
    counters = dict.fromkeys(usage.columns.keys(), 0)
    counters |= {"namespace": "team", "artifacts": count, "size_bytes": 7, "saved_seconds": 2.5}
    connection.execute(usage.insert(), counters)


def test_database_of_first_revision_upgrades_to_the_tables_and_downgrades(config, url):
    count = 1100  # more than one batch

    def names():
        return set(on(url, lambda connection: sa.inspect(connection).get_table_names()))

    command.upgrade(config, "0001")
    on(url, lambda connection: fill(connection, count))

    command.upgrade(config, "head")
    assert names() == {*metadata.tables, "alembic_version"}
    ranked = rows_of(url, "artifacts")
    assert len(ranked) == count
    for number, row in enumerate(ranked):
        worth = density(compile_seconds=1.5 + number, size_bytes=5000 + number)
        assert row.toolchain == ("" if number == 0 else f"jax 0.{number % 3}")
        assert row.density == pytest.approx(worth)
        assert row.rank == pytest.approx(worth + aged(NOW))
        assert (row.hits, row.last_used_at, row.pinned_until) == (number, NOW, None)

    command.downgrade(config, "0001")
    command.upgrade(config, "head")
    assert len(rows_of(url, "artifacts")) == count
    (usage,) = rows_of(url, "usage")
    assert (usage.artifacts, usage.size_bytes, usage.saved_seconds) == (count, 7, 2.5)
    assert (usage.evictions, usage.evicted_bytes) == (0, 0)
    command.check(config)
    command.downgrade(config, "base")
    assert names() == {"alembic_version"}


def rows_of(url, name):
    table = metadata.tables[name]
    chosen = sa.select(table).order_by(*table.primary_key)
    return on(url, lambda connection: connection.execute(chosen).all())


INDEX = "ix_artifacts_namespace_created_at"
CONCURRENTLY = f"CREATE INDEX CONCURRENTLY {INDEX} ON artifacts (namespace, created_at)"
IS_VALID = f"SELECT indisvalid FROM pg_index WHERE indexrelid = '{INDEX}'::regclass"


@pytest.fixture(scope="module")
def filled_name(postgres):
    """The name of a filled PostgreSQL database at revision 0009."""
    url = postgres.new_database(template=EMPTY)
    command.upgrade(alembic_config(url), "0009")
    on(url, lambda connection: fill(connection, 10))
    return sa.make_url(url).database


@asynccontextmanager
async def storing(url):
    """A connection with an open transaction that has stored an artifact."""
    async with connected(url) as connection:
        await connection.execute("BEGIN")
        await store(connection, "begun")
        yield connection


async def store(connection, fingerprint):
    await connection.execute(
        "INSERT INTO artifacts SELECT (json_populate_record(artifacts, $1::json)).*"
        " FROM artifacts LIMIT 1",
        json.dumps({"fingerprint": fingerprint}),
    )


async def until_it_waits(connection, statement, *, work):
    """Wait until a statement waits for a lock. `work` is the task that runs the statement."""
    while not await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity"
        f" WHERE wait_event_type = 'Lock' AND query LIKE '{statement}%'"
    ):
        await asyncio.wait([work], timeout=0.05)
        assert not work.done()


@pytest.fixture
def url_before(postgres, filled_name, caplog):
    """A copy of the filled database at revision 0009."""
    caplog.set_level(logging.INFO)
    return postgres.new_database(template=filled_name)


@pytest.mark.anyio
async def test_artifacts_can_be_stored_while_their_index_is_built(url_before, caplog):
    upgrade = partial(command.upgrade, alembic_config(url_before), "head")
    async with connected(url_before) as other, storing(url_before) as slow:
        upgrading = asyncio.create_task(asyncio.to_thread(upgrade))
        await until_it_waits(other, f"CREATE INDEX%{INDEX}", work=upgrading)
        assert "waits for transactions that began before it" in caplog.text
        await other.execute("SET lock_timeout = '5s'")
        await store(other, "meanwhile")
        await slow.execute("COMMIT")
        await upgrading
        assert await other.fetchval(IS_VALID)
        assert await other.fetchval("SELECT count(*) FROM artifacts") == 12


def settings_of_the_build(url):
    """Return the settings of the connection that builds the index, read when the build starts."""
    found = {}

    def look(connection, _cursor, statement, *_):
        if statement.startswith("CREATE INDEX") and INDEX in statement:
            for name in ("lock_timeout", "statement_timeout"):
                found[name] = connection.exec_driver_sql(f"SHOW {name}").scalar_one()

    sa.event.listen(sa.Engine, "before_cursor_execute", look)
    try:
        command.upgrade(alembic_config(url), "head")
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", look)
    return found


@pytest.mark.anyio
async def test_migrator_that_waits_for_another_logs_it_once(url_before, caplog, tmp_path):
    upgrade = partial(migrate, url_before, lock_path=tmp_path / "lock")
    async with connected(url_before) as other:
        await other.execute("SELECT pg_advisory_lock(8077)")
        upgrading = asyncio.create_task(asyncio.to_thread(upgrade))
        while "another server migrates" not in caplog.text:
            await asyncio.wait([upgrading], timeout=0.05)
            assert not upgrading.done()
        await asyncio.wait([upgrading], timeout=0.5)
        await other.execute("SELECT pg_advisory_unlock(8077)")
        await upgrading
    assert caplog.text.count("another server migrates") == 1


@pytest.mark.anyio
async def test_waiting_server_ends_session_that_idles_during_a_migration(
    url_before, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr(migration, "IDLE_SECONDS", 1)
    async with connected(url_before) as frozen:
        await frozen.execute("SELECT pg_advisory_lock(8077)")
        await asyncio.to_thread(migrate, url_before, lock_path=tmp_path / "lock")
        assert "has been idle for more than 1 s in the middle of a migration" in caplog.text
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
            await frozen.execute("SELECT 1")


@pytest.mark.anyio
async def test_deadlock_with_previous_release_is_retried(url_before, caplog, tmp_path):
    """The other server waits for the lock in a transaction, and the build waits for its end."""
    upgrade = partial(migrate, url_before, lock_path=tmp_path / "lock")
    async with (
        connected(url_before) as other,
        connected(url_before) as older,
        storing(url_before) as slow,
    ):
        upgrading = asyncio.create_task(asyncio.to_thread(upgrade))
        await until_it_waits(other, f"CREATE INDEX%{INDEX}", work=upgrading)
        await older.execute("SET deadlock_timeout = '1h'")  # so PostgreSQL ends the other session
        await older.execute("BEGIN")
        turn = asyncio.create_task(older.execute("SELECT pg_advisory_xact_lock(8077)"))
        await until_it_waits(other, "SELECT pg_advisory_xact_lock", work=upgrading)
        await slow.execute("COMMIT")
        await asyncio.wait_for(turn, 60)
        await older.execute("COMMIT")
        await upgrading
        assert await other.fetchval(IS_VALID)
    assert "retrying" in caplog.text
    assert await find_revision(url_before) == newest_revision()


@pytest.mark.anyio
@pytest.mark.parametrize("is_whole", [True, False])
async def test_interrupted_index_build_is_completed(url_before, is_whole):
    """The build may wait for hours, for example for a dump, and a frozen migrator is cut off."""
    async with connected(url_before) as other, storing(url_before) as slow:
        if is_whole:
            await slow.execute("COMMIT")
        else:
            await other.execute("SET lock_timeout = '50ms'")
        with nullcontext() if is_whole else pytest.raises(asyncpg.LockNotAvailableError):
            await other.execute(CONCURRENTLY)
        assert await other.fetchval(IS_VALID) is is_whole
    # The build replaces the limits of the earlier steps.
    assert await asyncio.to_thread(settings_of_the_build, url_before) == {
        "lock_timeout": "6h",
        "statement_timeout": "0",
    }
    async with connected(url_before) as other:
        assert await other.fetchval(IS_VALID)
    assert await find_revision(url_before) == newest_revision()


def settings_for(url, tmp_path, **more):
    return load_settings(database_url=url, data_dir=tmp_path, **more)


def test_server_that_may_not_migrate_names_the_command(config, url, tmp_path):
    settings = settings_for(url, tmp_path)
    with pytest.raises(StartError, match="revision none and this release needs"):
        asyncio.run(prepare_database(settings, is_migrating=False))

    command.upgrade(config, "0001")
    with pytest.raises(StartError, match="graphstash migrate"):
        asyncio.run(prepare_database(settings, is_migrating=False))

    asyncio.run(prepare_database(settings, is_migrating=True))
    asyncio.run(prepare_database(settings, is_migrating=False))
    assert asyncio.run(find_revision(url)) == newest_revision()
    on(url, lambda connection: fill(connection, 10))  # by an older server


@pytest.mark.parametrize("tables", [["thesis"], ["alembic_version", "thesis"]])
def test_database_of_another_program_is_refused_and_not_changed(url, tmp_path, tables):
    for table in tables:
        create = sa.text(f"CREATE TABLE {table} (version_num VARCHAR(9))")
        on(url, lambda connection, create=create: connection.execute(create))
    for use in (migrate, migration.check_revision):
        with pytest.raises(StartError, match="is of another program: it has the table thesis"):
            use(url, lock_path=tmp_path / "lock")
    names = on(url, lambda connection: sa.inspect(connection).get_table_names())
    assert sorted(names) == tables


def test_tables_of_an_extension_do_not_count_as_another_program(postgres, tmp_path):
    url = postgres.new_database(template=EMPTY)
    for statement in (
        "CREATE TABLE spatial_ref_sys (srid integer)",
        "ALTER EXTENSION plpgsql ADD TABLE spatial_ref_sys",  # like CREATE EXTENSION postgis
    ):
        on(url, lambda connection, statement=statement: connection.execute(sa.text(statement)))
    migrate(url, lock_path=tmp_path / "lock")
    assert asyncio.run(find_revision(url)) == newest_revision()


def test_server_runs_on_database_of_later_release(config, url, tmp_path, caplog):
    command.upgrade(config, "head")
    later = sa.text("UPDATE alembic_version SET version_num='9999'")
    on(url, lambda connection: connection.execute(later))

    with caplog.at_level(logging.WARNING):
        for is_migrating in (False, True):
            asyncio.run(prepare_database(settings_for(url, tmp_path), is_migrating=is_migrating))

    assert "9999" in caplog.text
    assert asyncio.run(find_revision(url)) == "9999"


def test_unreachable_database_is_named_without_password(postgres, tmp_path):
    wrong = postgres.url.replace(":secret@", ":hunter2@")
    for url, named in (
        ("postgresql://someone:hunter2@127.0.0.1:1/x", "127.0.0.1:1"),
        (wrong, "password authentication failed"),
    ):
        with pytest.raises(StartError, match=named) as failure:
            asyncio.run(prepare_database(settings_for(url, tmp_path), is_migrating=True))
        assert "hunter2" not in str(failure.value)


def test_revisions_only_add_and_do_not_import_the_product():
    """In a rolling upgrade, servers of the previous release continue after the migration."""
    for revision in (Path(__file__).parents[2] / "migrations" / "versions").glob("*.py"):
        text = revision.read_text()
        assert "graphstash" not in text
        assert "drop_" not in text.split("def downgrade")[0]
