"""A server process that is frozen in the midst of an upload, beside one that works."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_server.testing import ServerProcess
from support.database_sessions import BOUND_SECONDS, connected, eventually, waiting
from support.services import key_of

pytestmark = [pytest.mark.extended, pytest.mark.anyio]

_ATTEMPTS = 5


async def put(http, url, namespace, number):
    blob = os.urandom(1000)
    path = f"{url}/v1/{namespace}/artifacts/{key_of(number).key}"
    return await http.put(path, content=blob, headers={"Repr-Digest": Digest.of(blob).repr_digest})


@pytest.fixture(scope="module")
def shared(postgres):
    """The database of two servers."""
    return postgres.new_database()


@pytest.fixture(scope="module")
def servers(tmp_path_factory, shared):
    data_dir = tmp_path_factory.mktemp("frozen") / "data"
    environment = {"GRAPHSTASH_DATABASE_URL": shared}
    with (
        ServerProcess(data_dir, environment=environment) as one,
        ServerProcess(data_dir, environment=environment) as other,
    ):
        yield one, other
        one.process.send_signal(signal.SIGCONT)


async def state_of(watch, pid):
    return await watch.fetchval(
        "SELECT coalesce(max(state), 'gone') FROM pg_stat_activity WHERE pid = $1", pid
    )


async def freeze(server, http, shared, watch, number):
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


async def test_other_namespaces_continue_and_frozen_one_recovers(servers, shared):
    one, other = servers
    async with (
        connected(shared) as watch,
        httpx.AsyncClient(timeout=BOUND_SECONDS, trust_env=False) as http,
    ):
        assert (await put(http, other.url, "free", 0)).status_code == 201
        for number in range(8):  # prepared statements are sent in one piece
            assert (await put(http, one.url, "held", 1000 + number)).status_code == 201
        for attempt in range(_ATTEMPTS):
            frozen = await freeze(one, http, shared, watch, 2 * attempt)
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
                return await state_of(watch, session) == "gone"

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
