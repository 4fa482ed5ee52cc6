"""A frozen server or PostgreSQL session delays only its own namespace, for a limited time."""

import asyncio
import os
import signal

import httpx
import pytest
from sqlalchemy import text

from graphstash_schema import Digest, ErrorCode, LeaseState, Namespace, NamespacePolicy
from graphstash_server.db import engine as engine_module
from graphstash_server.db import notifications
from graphstash_server.errors import ServerError
from graphstash_server.services import accounting as accounting_module
from graphstash_server.services import exposition, metrics
from graphstash_server.services.artifacts import uploads as uploads_module
from support.database_sessions import BOUND_SECONDS, connected, eventually, waiting
from support.postgres import Postgres
from support.services import ACTOR, answer_before_the_commit, key_of, opener
from support.tokens import Guarded
from support.waiting import until

pytestmark = pytest.mark.anyio


async def test_stopping_server_does_not_wait_for_silent_sessions(on_postgresql, monkeypatch):
    monkeypatch.setattr(engine_module, "_STATEMENT_SECONDS", 10 * BOUND_SECONDS)
    opened = engine_module.Database(on_postgresql)
    async with opened.writing() as one, opened.writing() as other:
        sessions = [
            await connection.scalar(text("SELECT pg_backend_pid()")) for connection in (one, other)
        ]
    for session in sessions:
        os.kill(session, signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_SECONDS):
            await opened.close()
    finally:
        for session in sessions:
            os.kill(session, signal.SIGCONT)


async def test_listener_with_silent_session_reconnects(on_postgresql, monkeypatch):
    monkeypatch.setattr(notifications, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(notifications, "_ANSWER_SECONDS", 0.5)
    heard, states = [], []
    listener = notifications.Listener(
        engine_module.Database(on_postgresql), heard=heard.append, is_listening=states.append
    )
    listening = asyncio.create_task(listener.run())
    async with connected(on_postgresql) as watch:

        async def session():
            return await watch.fetchval(
                "SELECT max(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'graphstash'"
            )

        async def hears():
            await watch.execute("SELECT pg_notify('graphstash', 'news')")
            return heard

        await eventually(hears)
        frozen = await session()
        os.kill(frozen, signal.SIGSTOP)
        try:
            await eventually(lambda: asyncio.sleep(0, not states[-1]))
            heard.clear()
            await eventually(hears)
        finally:
            os.kill(frozen, signal.SIGCONT)
    listening.cancel()
    await asyncio.wait([listening])


async def test_frozen_server_blocks_only_its_namespace_and_acknowledges_nothing(
    tmp_path, on_postgresql, monkeypatch
):
    """The server stops between the rows of an upload and its commit, so its session is idle."""
    timeouts = ("idle_in_transaction_session_timeout", "lock_timeout")
    idle, lock = (float(engine_module._POOL_SETTINGS[each].removesuffix("s")) for each in timeouts)
    assert 0 < idle < lock  # otherwise the waiting uploads are refused
    for timeout, patience in zip(timeouts, ("50s", "60s"), strict=True):
        monkeypatch.setitem(engine_module._POOL_SETTINGS, timeout, patience)
    is_frozen, has_waited, thaws = (asyncio.Event() for _ in range(3))
    shown = []
    store_all = uploads_module._store_all

    async def store(connection, uploads, *more):
        outcomes = await store_all(connection, uploads, *more)
        if uploads[0].toolchain == "frozen":
            shown.append(await connection.scalar(text(f"SHOW {timeouts[0]}")))
            is_frozen.set()
            await has_waited.wait()
            # Stands for the rest of the 50 s.
            await connection.execute(text(f"SET LOCAL {timeouts[0]} = '0.1s'"))
            await thaws.wait()
        return outcomes

    monkeypatch.setattr(uploads_module, "_store_all", store)
    opened = opener(tmp_path, on_postgresql)
    async with opened() as one, opened() as other, connected(on_postgresql) as watch:
        await other.put(b"free", namespace="free")
        upload = asyncio.create_task(one.put(b"held", namespace="held", toolchain="frozen"))
        await is_frozen.wait()
        assert shown == ["50s"]
        held = asyncio.create_task(other.put(b"also held", 1, namespace="held"))
        await eventually(lambda: waiting(watch))
        ready = await other.context.health.check()
        assert await other.put(b"also free", 1, namespace="free")
        assert not held.done()

        has_waited.set()
        assert await held  # the database has ended the idle session
        thaws.set()
        with pytest.raises(ServerError) as refused:
            await upload
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert ready.is_ready
        assert "done nothing for" in ready.locks
        assert await one.put(b"held", namespace="held")


async def test_lasting_lock_is_refused_with_reason(tmp_path, on_postgresql, monkeypatch):
    """A busy client or a server of the previous release may hold the lock."""
    monkeypatch.setattr(engine_module, "_LOCK_SECONDS", 0.2)
    monkeypatch.setitem(engine_module._POOL_SETTINGS, "lock_timeout", "0.2s")
    async with opener(tmp_path, on_postgresql)() as server, connected(on_postgresql) as watch:
        await server.put(b"0", namespace="locked")
        async with watch.transaction():
            await watch.execute("UPDATE usage SET hits = hits WHERE namespace = 'locked'")
            with pytest.raises(ServerError, match=r"kept this one waiting for 0\.2 s") as refused:
                await server.put(b"1", 1, namespace="locked")
            assert await server.put(b"1", 1, namespace="unlocked")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert await server.put(b"1", 1, namespace="locked")


async def test_upload_committed_after_its_refusal_counts_once_and_ends_the_next_lease(
    tmp_path, on_postgresql, monkeypatch
):
    """The first holder gives up, so a second one compiles as well. Both have the first bytes."""
    monkeypatch.setitem(engine_module._POOL_SETTINGS, "lock_timeout", "60s")
    async with opener(tmp_path, on_postgresql)() as server, connected(on_postgresql) as watch:
        await server.put(b"another", 1)
        first = await server.acquire()
        async with watch.transaction():
            await watch.execute("UPDATE usage SET hits = hits")
            with monkeypatch.context() as patch:
                answer_before_the_commit(patch)
                with pytest.raises(ServerError) as refused:
                    await server.put(b"first")
            assert refused.value.code is ErrorCode.UNAVAILABLE
            await server.context.leases.release(key_of(), token=first.token)
            second = await server.acquire(caller="second")
            waiting = asyncio.create_task(server.acquire(caller="third", wait_seconds=60))
        assert second.state is LeaseState.GRANTED
        ready = await waiting
        assert (ready.state, ready.digest) == (LeaseState.READY, str(Digest.of(b"first")))

        assert not await server.put(b"first")  # the retry
        with pytest.raises(ServerError) as conflict:
            await server.put(b"second", policy=NamespacePolicy())
        assert conflict.value.code is ErrorCode.CONFLICT
        await server.context.leases.release(key_of(), token=second.token)
        await server.context.accounting.flush()
        used = await server.used()
        assert (used.artifacts, used.puts, used.size_bytes) == (2, 2, len(b"anotherfirst"))
        assert not server.context.allocator._taken
        assert await server.get() == b"first"


@pytest.mark.parametrize("table", ["usage", "artifacts"])
async def test_counters_are_written_while_another_namespace_waits(
    tmp_path, on_postgresql, monkeypatch, table
):
    monkeypatch.setitem(engine_module._POOL_SETTINGS, "lock_timeout", "0.2s")
    async with opener(tmp_path, on_postgresql)() as server, connected(on_postgresql) as holder:
        for namespace in ("held", "free"):
            await server.put(b"blob", namespace=namespace)
        accounting = server.context.accounting
        for namespace in ("held", "free"):
            accounting.count_hit(key_of(0, namespace), saved_seconds=1.0)
        async with holder.transaction():
            await holder.execute(f"UPDATE {table} SET hits = hits WHERE namespace = 'held'")
            with pytest.raises(ServerError, match="retry"):
                await accounting.flush()
            hits = dict(await holder.fetch(f"SELECT namespace, hits FROM {table}"))
            assert hits == {"held": 0, "free": 1}
        await accounting.flush()
        for each in ("usage", "artifacts"):
            hits = dict(await holder.fetch(f"SELECT namespace, hits FROM {each}"))
            assert hits == {"held": 1, "free": 1}


async def test_server_that_freezes_in_a_flush_holds_no_lock(tmp_path, on_postgresql, monkeypatch):
    """The flush is the only transaction that spans namespaces."""
    is_frozen, thaws = asyncio.Event(), asyncio.Event()
    add = accounting_module.add_requests

    async def add_and_freeze(*arguments, **named):
        skipped = await add(*arguments, **named)
        is_frozen.set()
        await thaws.wait()
        return skipped

    monkeypatch.setattr(accounting_module, "add_requests", add_and_freeze)
    async with opener(tmp_path, on_postgresql)() as server, connected(on_postgresql) as watch:
        for namespace in ("one", "other"):
            await server.put(b"blob", namespace=namespace)
            server.context.accounting.count_hit(key_of(0, namespace), saved_seconds=1.0)
        flushing = asyncio.create_task(server.context.accounting.flush())
        await is_frozen.wait()
        for table in ("artifacts", "usage", "history"):
            assert len(await watch.fetch(f"SELECT 1 FROM {table} FOR UPDATE NOWAIT")) >= 2
        assert {row[0] for row in await watch.fetch("SELECT hits FROM usage")} == {1}
        thaws.set()
        await flushing


async def test_no_other_transaction_spans_namespaces(tmp_path, on_postgresql):
    """Each transaction changes the usage row of its namespace, so a trigger detects joined ones."""
    names = ("a", "b", "c")
    opened = opener(tmp_path, on_postgresql)
    async with opened(soft_limit_bytes=40_000) as server, connected(on_postgresql) as watch:
        await watch.execute(
            "CREATE TABLE joined (number bigint, namespace text);"
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN INSERT INTO joined VALUES (txid_current(), NEW.namespace);"
            " RETURN NULL; END';"
            "CREATE TRIGGER note AFTER INSERT OR UPDATE ON usage FOR EACH ROW "
            "EXECUTE FUNCTION note();"
        )
        context = server.context
        blobs = [(name, number) for number in range(4) for name in names]
        await asyncio.gather(
            *(
                server.put(f"{name} {number}".encode() * 200, number, namespace=name)
                for name, number in blobs
            )
        )
        for name, number in blobs:
            await context.manifests.merge(
                Namespace(name), "job", [key_of(number, name)], writer="somebody", actor=ACTOR
            )
        evicted = await context.evictor.run(actor=ACTOR)
        await watch.execute("ALTER TABLE usage DISABLE TRIGGER note")
        await watch.execute("UPDATE usage SET size_bytes = size_bytes + 1")
        await watch.execute("ALTER TABLE usage ENABLE TRIGGER note")
        wrong = await context.reconciler.recount(is_repair=True)
        opened.clock.turn(10**8)
        await context.manifests.drop_unused()
        found = await watch.fetch(
            "SELECT number, count(DISTINCT namespace) AS namespaces FROM joined GROUP BY number"
        )
    assert evicted > len(names)
    assert list(wrong) == sorted(names)
    assert {row["namespaces"] for row in found} == {1}


def test_metrics_and_readiness_report_a_frozen_database(tmp_path, monkeypatch):
    """The report precedes the timeout of statements. Prometheus ends a scrape after ten seconds."""
    assert exposition._DATABASE_SECONDS + metrics._DATABASE_SECONDS < 10
    monkeypatch.setattr(engine_module, "_STATEMENT_SECONDS", 10 * BOUND_SECONDS)
    monkeypatch.setattr(exposition, "_DATABASE_SECONDS", BOUND_SECONDS)
    with Postgres() as own, Guarded(tmp_path, database_url=own.new_database()) as server:

        def ask(path, token=None):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return httpx.get(
                server.url + path, headers=headers, timeout=BOUND_SECONDS, trust_env=False
            )

        def scrape(token):
            answer = ask("/metrics", token)
            assert answer.status_code == 200, answer.text
            return set(answer.text.splitlines())

        known, narrow, unknown = (
            server.token(grant) for grant in ("read:*", "read:team", "read:*")
        )
        assert "graphstash_database_up 1.0" in scrape(known)
        assert ask("/metrics", narrow).status_code == 403
        with own.frozen(), monkeypatch.context() as patch:
            for module in (exposition, metrics):
                patch.setattr(module, "_DATABASE_SECONDS", 0.2)
            assert {"graphstash_database_up 0.0", "graphstash_workers 1.0"} <= scrape(known)
            series = [line for line in scrape(unknown) if not line.startswith("#")]
            assert sorted(series) == [
                "graphstash_database_corrupt 0.0",
                "graphstash_database_up 0.0",
            ]
            assert ask("/metrics", narrow).status_code == 403
            assert ask("/metrics").status_code == 401
            ready = ask("/readyz")
            assert ready.status_code == 503
            assert "database failed: no answer within 0.2 seconds" in ready.json()["detail"]
        until(lambda: "graphstash_database_up 1.0" in scrape(unknown))
        until(lambda: ask("/readyz").status_code == 200)


async def test_revoked_token_gets_no_metrics_of_namespaces_if_its_check_is_slow(
    tmp_path, on_postgresql
):
    with Guarded(tmp_path, database_url=on_postgresql) as server:
        token = server.token("read:*")

        async def scrape():
            async with httpx.AsyncClient(trust_env=False, timeout=BOUND_SECONDS) as http:
                headers = {"Authorization": f"Bearer {token}"}
                return await http.get(server.url + "/metrics", headers=headers)

        assert "graphstash_hits_total" in (await scrape()).text
        async with connected(on_postgresql) as holder:
            transaction = holder.transaction()
            await transaction.start()
            # Lock the table before the change. Otherwise the server, which records uses of tokens,
            # would hold a lock on the table and wait for the changed row: a deadlock.
            await holder.execute("LOCK TABLE tokens IN ACCESS EXCLUSIVE MODE")
            await holder.execute("UPDATE tokens SET revoked_at = now()")
            # The server may use its cached check for two seconds.
            found = ""
            while "graphstash_database_up 0.0" not in found:
                found = (await scrape()).text
            assert "graphstash_workers 1.0" in found
            assert "graphstash_hits_total" not in found
            await transaction.commit()
