"""A server, or a session of PostgreSQL, that is frozen: what waits for it, and for how long."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import pytest
from sqlalchemy import text

from graphstash_schema import Digest, Namespace
from graphstash_server.db import engine as engine_module
from graphstash_server.db import notifications
from graphstash_server.errors import ServerError
from graphstash_server.testing import ServerProcess
from support.services import ACTOR, key_of, opener

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

_ATTEMPTS = 5
_BOUND_SECONDS = 60.0
"""Far above what it takes: a loaded machine decides nothing."""


@pytest.fixture
def database(postgres):
    return postgres.new_database()


@asynccontextmanager
async def connected(database):
    connection = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        yield connection
    finally:
        await connection.close()


async def eventually(ask):
    """Waits until it says something true, which is returned."""
    deadline = time.monotonic() + _BOUND_SECONDS
    while not (found := await ask()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


def waiting(watch):
    """Sessions that wait for a lock."""
    return watch.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'"
    )


async def put(http, url, namespace, number):
    blob = os.urandom(1000)
    path = f"{url}/v1/{namespace}/artifacts/{key_of(number).key}"
    return await http.put(path, content=blob, headers={"Repr-Digest": Digest.of(blob).repr_digest})


async def test_a_server_that_stops_does_not_wait_for_silent_sessions(database, monkeypatch):
    monkeypatch.setattr(engine_module, "_STATEMENT_SECONDS", 10 * _BOUND_SECONDS)
    opened = engine_module.Database(database)
    async with opened.writing() as one, opened.writing() as other:
        sessions = [
            await connection.scalar(text("SELECT pg_backend_pid()")) for connection in (one, other)
        ]
    for session in sessions:
        os.kill(session, signal.SIGSTOP)
    try:
        async with asyncio.timeout(_BOUND_SECONDS):
            await opened.close()
    finally:
        for session in sessions:
            os.kill(session, signal.SIGCONT)


async def test_listener_with_silent_session_reconnects(database, monkeypatch):
    monkeypatch.setattr(notifications, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(notifications, "_ANSWER_SECONDS", 0.5)
    heard, states = [], []
    listener = notifications.Listener(
        engine_module.Database(database), heard=heard.append, is_listening=states.append
    )
    listening = asyncio.create_task(listener.run())
    async with connected(database) as watch:

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


@pytest.fixture(scope="module")
def shared(postgres):
    """The database of two servers."""
    return postgres.new_database()


@pytest.fixture(scope="module")
def servers(tmp_path_factory, shared, process_environment):
    data_dir = tmp_path_factory.mktemp("frozen") / "data"
    environment = process_environment | {"GRAPHSTASH_DATABASE_URL": shared}
    with (
        ServerProcess(data_dir, environment=environment) as one,
        ServerProcess(data_dir, environment=environment) as other,
    ):
        yield one, other
        one.process.send_signal(signal.SIGCONT)


class TestAnUpload:
    """Of one server, while another one is frozen between the rows of an upload and its commit."""

    async def state_of(self, watch, pid):
        return await watch.fetchval(
            "SELECT coalesce(max(state), 'gone') FROM pg_stat_activity WHERE pid = $1", pid
        )

    async def freeze(self, server, http, shared, watch, number):
        """Stops it between two statements of the transaction of an upload. Returns the upload and
        its session in PostgreSQL, or None when the transaction was over before.
        """
        async with connected(shared) as holder:
            holding = holder.transaction()
            await holding.start()
            await holder.execute("LOCK TABLE audit IN SHARE MODE")  # the last that is written
            upload = asyncio.create_task(put(http, server.url, "held", number))
            (waiter,) = await eventually(lambda: waiting(watch))
            server.process.send_signal(signal.SIGSTOP)
            status = Path(f"/proc/{server.process.pid}/stat")
            await eventually(lambda: asyncio.to_thread(lambda: ") T " in status.read_text()))
            await holding.rollback()

        async def state():
            session = await watch.fetchrow(
                "SELECT state, wait_event FROM pg_stat_activity WHERE pid = $1", waiter["pid"]
            )
            if session is None:
                return "gone"
            # An active session that reads waits for the rest of a statement that is not prepared.
            is_working = session["state"] == "active" and session["wait_event"] != "ClientRead"
            return None if is_working else session["state"]

        if await eventually(state) == "idle in transaction":
            return upload, waiter["pid"]
        server.process.send_signal(signal.SIGCONT)
        await upload
        return None

    async def test_other_namespaces_continue_and_frozen_one_recovers(self, servers, shared):
        one, other = servers
        async with (
            connected(shared) as watch,
            httpx.AsyncClient(timeout=_BOUND_SECONDS, trust_env=False) as http,
        ):
            assert (await put(http, other.url, "free", 0)).status_code == 201
            for number in range(8):  # prepared statements are sent in one piece
                assert (await put(http, one.url, "held", 1000 + number)).status_code == 201
            for attempt in range(_ATTEMPTS):
                frozen = await self.freeze(one, http, shared, watch, 2 * attempt)
                if frozen is None:
                    continue
                upload, session = frozen
                held = asyncio.create_task(put(http, other.url, "held", 2 * attempt + 1))
                await eventually(lambda: waiting(watch))
                ready = await http.get(f"{other.url}/readyz")
                free = await put(http, other.url, "free", attempt + 1)
                did_not_wait = not held.done()
                held_answer = await held

                async def is_cut_off(session=session):
                    return await self.state_of(watch, session) == "gone"

                await eventually(is_cut_off)
                one.process.send_signal(signal.SIGCONT)
                frozen_answer = await upload
                if did_not_wait:
                    break
            assert did_not_wait, "the upload to another namespace waited for the held one"
            assert free.status_code == 201
            assert ready.json()["status"] == "ready"
            assert "done nothing for" in ready.json()["locks"]
            # Its session was ended; what it had not committed, it does not acknowledge.
            assert frozen_answer.status_code == 503
            assert frozen_answer.json()["retryable"]
            # The other server's waits for that, or is refused by a machine that is too slow.
            assert held_answer.status_code == 201 or held_answer.json()["retryable"]
            for server, number in ((one, 2 * attempt), (other, 2 * attempt + 101)):
                assert (await put(http, server.url, "held", number)).status_code == 201
            assert (await http.get(f"{one.url}/readyz")).json()["locks"] == "ok"

    async def test_lasting_lock_is_refused_with_reason(self, servers, shared):
        """Held by somebody who works, or by a server of the release before."""
        _, other = servers
        async with (
            connected(shared) as watch,
            httpx.AsyncClient(timeout=_BOUND_SECONDS, trust_env=False) as http,
        ):
            assert (await put(http, other.url, "locked", 0)).status_code == 201
            async with watch.transaction():
                await watch.execute("UPDATE usage SET hits = hits WHERE namespace = 'locked'")
                answer = await put(http, other.url, "locked", 1)
                assert (await put(http, other.url, "unlocked", 1)).status_code == 201
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (503, "unavailable")
            assert problem["retryable"]
            assert int(answer.headers["Retry-After"]) > 0
            assert "kept this one waiting for 5 s" in problem["detail"]
            assert (await put(http, other.url, "locked", 1)).status_code == 201


async def test_counters_are_written_while_another_namespace_waits(tmp_path, database, monkeypatch):
    monkeypatch.setitem(engine_module._POOL_SETTINGS, "lock_timeout", "0.2s")
    async with opener(tmp_path, database)() as server, connected(database) as holder:
        for namespace in ("held", "free"):
            await server.put(b"blob", namespace=namespace)
        accounting = server.context.accounting
        for namespace in ("held", "free"):
            accounting.count_hit(key_of(0, namespace), saved_seconds=1.0)
        async with holder.transaction():
            await holder.execute("UPDATE usage SET hits = hits WHERE namespace = 'held'")
            with pytest.raises(ServerError, match="retry"):
                await accounting.flush()
            assert [(await server.used(name)).hits for name in ("held", "free")] == [0, 1]
        await accounting.flush()
        assert [(await server.used(name)).hits for name in ("held", "free")] == [1, 1]


async def test_no_transaction_joins_namespaces(tmp_path, database):
    """Each counts its changes in the row of its namespace, so that row tells."""
    names = ("a", "b", "c")
    opened = opener(tmp_path, database)
    async with opened(soft_limit_bytes=3_000) as server, connected(database) as watch:
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
            context.accounting.count_hit(key_of(number, name), saved_seconds=1.0)
            await context.manifests.merge(
                Namespace(name), "job", [key_of(number, name)], writer="somebody", actor=ACTOR
            )
        await context.accounting.flush()
        evicted = await context.evictor.run(actor=ACTOR)
        await watch.execute("UPDATE usage SET size_bytes = size_bytes + 1")
        await watch.execute("DELETE FROM joined")
        wrong = await context.reconciler.recount(is_repair=True)
        opened.clock.turn(10**8)
        await context.manifests.drop_unused()
        found = await watch.fetch(
            "SELECT number, count(DISTINCT namespace) AS namespaces FROM joined GROUP BY number"
        )
    assert evicted > len(names)
    assert list(wrong) == sorted(names)
    assert {row["namespaces"] for row in found} == {1}
