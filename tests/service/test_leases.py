"""Leases: one caller compiles, and all others wait."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import httpx
import pytest
import sqlalchemy as sa

from graphstash_schema import Digest, ErrorCode, LeaseRequest, LeaseState
from graphstash_server.db import tables
from graphstash_server.errors import ServerError
from graphstash_server.services.jobs import leases
from graphstash_server.services.jobs.leases import Acquisition
from graphstash_server.testing import LiveServer
from support.services import key_of
from support.waiting import until

pytestmark = pytest.mark.anyio

BLOB = b"an executable" * 1000

WAIT = 60
"""Seconds for which a waiter waits: the server's maximum, and longer than the test waits for an
answer. Therefore, an event causes each answer."""
_ANSWER_SECONDS = 50


def waiters(api) -> int:
    return api.http.get("/v1/stats").json()["waiters"]


def wait(api):
    """Acquire a lease, waiting for an event."""
    api.http.timeout = httpx.Timeout(_ANSWER_SECONDS)
    return api.acquire(wait=WAIT, ttl_seconds=600)


@pytest.fixture
def only_woken(monkeypatch):
    """Disable polling: only an event or the end of the lease makes a waiter look."""
    for name in ("_POLL_SECONDS", "_POLL_SECONDS_WITH_NOTIFICATIONS"):
        monkeypatch.setattr(leases, name, 3600)


def test_first_caller_gets_lease_and_others_get_its_holder_and_expiry(api):
    answer = api.acquire(holder="me@here", ttl_seconds=20)

    granted = answer.json()
    assert answer.status_code == 201
    assert granted["state"] == "granted"
    assert len(granted["token"]) == 32
    assert granted["fencing"] > 0
    assert granted["ttl_seconds"] == 20
    assert answer.headers["cache-control"] == "no-store"
    for holder in ("you@there", "me@here"):
        answer = api.acquire(holder=holder)
        held = answer.json()
        assert answer.status_code == 202
        assert held["state"] == "held"
        assert held["holder"] == "me@here"
        assert 0 < held["expires_in_seconds"] <= 20
        assert answer.headers["retry-after"] == "1"
        assert "token" not in held


@pytest.mark.sql
@pytest.mark.usefixtures("only_woken")
def test_one_of_many_callers_is_granted_the_lease_and_its_commit_wakes_the_others(api, connect):
    askers = [connect(api.url, api.namespace) for _ in range(17)]

    with ThreadPoolExecutor(17) as pool:
        waiting = [pool.submit(wait, asker) for asker in askers]
        until(lambda: waiters(api) == 16 and any(each.done() for each in waiting))
        (granted,) = (each.result() for each in waiting if each.done())
        api.put(BLOB)
        answers = [each.result() for each in waiting if each.result() is not granted]

    token = granted.json()["token"]
    assert granted.status_code == 201
    assert api.renew(token).status_code == 410
    assert api.release(token, "published").status_code == 204
    assert [answer.status_code for answer in answers] == [200] * 16
    assert {answer.headers["preference-applied"] for answer in answers} == {f"wait={WAIT}"}
    answers.append(api.acquire())
    ready = {"state": "ready", "digest": str(Digest.of(BLOB)), "size_bytes": len(BLOB)}
    assert [answer.json() for answer in answers] == [ready] * 17
    assert waiters(api) == 0


@pytest.mark.usefixtures("only_woken")
def test_failed_lease_is_granted_to_exactly_one_waiter(api, connect):
    token = api.acquire(ttl_seconds=600).json()["token"]
    waited = api.acquire(wait=1)
    assert (waited.status_code, waited.headers["preference-applied"]) == (202, "wait=1")
    askers = [connect(api.url, api.namespace) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(wait, asker) for asker in askers]
        until(lambda: waiters(api) == 4)
        assert api.release(token, "failed").status_code == 204
        until(lambda: any(each.done() for each in waiting))
        assert waiters(api) == 3
        api.put(BLOB)
        answers = [each.result().status_code for each in waiting]

    assert sorted(answers) == [200, 200, 200, 201]


@pytest.mark.sql
def test_expired_lease_goes_to_next_waiter_with_higher_fencing_number(api, problem):
    numbers = []
    for outcome in ("failed", "published", "failed"):
        granted = api.acquire().json()
        numbers.append(granted["fencing"])
        for _ in range(2):  # the second release has no effect
            assert api.release(granted["token"], outcome).status_code == 204
    problem(api.release("0" * 32, "failed"), 410, "lease_lost")  # no process holds the lease now
    lost = api.acquire(ttl_seconds=1).json()
    answer = wait(api)
    assert answer.status_code == 201
    taken = answer.json()
    numbers += [lost["fencing"], taken["fencing"]]

    assert numbers == sorted(set(numbers))
    for token in (lost["token"], "0" * 32):
        problem(api.renew(token), 410, "lease_lost")
        problem(api.release(token, "failed"), 410, "lease_lost")
    assert api.renew(taken["token"]).status_code == 200


@pytest.mark.sql
async def test_holder_can_release_after_a_commit_that_a_waiter_missed(opened, monkeypatch):
    """The waiter looks for the artifact before the commit, and for the lease after it."""
    async with opened() as server:
        granted = await server.acquire(0, "holder")
        artifacts = server.context.artifacts
        find = artifacts.find

        async def find_then_commit(key):
            monkeypatch.setattr(artifacts, "find", find)
            found = await find(key)
            assert await server.put(b"graph")
            return found

        monkeypatch.setattr(artifacts, "find", find_then_commit)
        assert (await server.acquire(0, "waiter")).state is LeaseState.READY
        await server.context.leases.release(key_of(0), token=granted.token)


async def test_renewal_extends_a_lease_unless_it_expired(opened):
    async with opened() as server:
        granted = await server.acquire(0, "one", ttl_seconds=3)
        answer = await renewed(server, granted.token, ttl_seconds=20)
        assert (answer.token, answer.fencing) == (granted.token, granted.fencing)
        assert answer.ttl_seconds == 20
        opened.clock.turn(19)
        assert (await server.acquire(0, "two")).state is LeaseState.HELD
        opened.clock.turn(1)
        with pytest.raises(ServerError, match="expired") as refused:
            await renewed(server, granted.token)
        assert refused.value.code == ErrorCode.LEASE_LOST
        assert (await server.acquire(0, "two")).state is LeaseState.GRANTED


def test_token_and_outcome_are_required_but_no_body(api, problem):
    answer = api.http.post(api.lease_path())
    assert (answer.status_code, answer.json()["ttl_seconds"]) == (201, 30)

    problem(api.http.put(api.lease_path(), json={}), 400, "invalid_request", "Graphstash-Lease")
    problem(api.http.delete(api.lease_path()), 400, "invalid_request", "outcome")
    problem(api.release("0" * 32, "exploded"), 400, "invalid_request", "exploded", "published")


async def test_another_waiter_polls_when_the_polling_one_hangs_up(opened):
    """The first waiter polls for all. When it hangs up, the second one must detect the expiry."""
    async with opened() as server:
        await server.acquire(0, "holder")
        gone = asyncio.get_running_loop().create_future()
        wanted = Acquisition(key_of(0), LeaseRequest(), WAIT, "first")
        first = asyncio.create_task(server.context.leases.acquire(wanted, gone=gone))
        await until_waiting(server, 1)
        second = asyncio.create_task(server.acquire(0, "second", wait_seconds=WAIT))
        await until_waiting(server, 2)

        gone.set_result(None)
        assert (await first).state is LeaseState.HELD
        opened.clock.turn(3600)
        async with asyncio.timeout(_ANSWER_SECONDS):
            assert (await second).state is LeaseState.GRANTED


async def test_lease_granted_to_a_caller_that_has_hung_up_is_released_at_once(opened):
    async with opened() as server:
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        wanted = Acquisition(key_of(0), LeaseRequest(), WAIT, "first")
        assert (await server.context.leases.acquire(wanted, gone=gone)).state is LeaseState.GRANTED
        assert await server.context.leases.count_held() == 0
        assert (await server.acquire(0, "second")).state is LeaseState.GRANTED


def test_lease_is_granted_for_artifact_that_lost_its_blob(api, file_of):
    blob = b"lost" + api.namespace.encode()
    api.put(blob)
    file_of(blob).unlink()

    assert api.acquire().status_code == 201


def test_waiter_is_woken_by_commit_of_another_server(tmp_path, connect):
    with LiveServer(tmp_path) as first, LiveServer(tmp_path) as second:
        here, there = connect(first.url), connect(second.url)
        here.acquire()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait, there)
            until(lambda: waiters(here) == 0 and waiters(connect(second.url)) == 1)
            here.put(BLOB)
            assert waiting.result().status_code == 200


@pytest.mark.sql
async def test_many_waiters_leave_database_connections_for_the_upload(opened, monkeypatch):
    async with opened() as server:
        artifacts, go_on = server.context.artifacts, asyncio.Event()
        crowded, has_begun = [], asyncio.Event()
        find = artifacts.find

        async def slow_find(key):
            async with server.context.database.reading():  # like a host under load
                crowded.append(key)
                if len(crowded) == server.context.database.shared_connections:
                    has_begun.set()
                await go_on.wait()
            return await find(key)

        monkeypatch.setattr(artifacts, "find", slow_find)
        crowd = [asyncio.create_task(server.acquire(0, f"caller {n}")) for n in range(100)]
        await has_begun.wait()
        async with asyncio.timeout(_ANSWER_SECONDS):
            assert await server.put(b"graph")
        go_on.set()
        async with asyncio.timeout(_ANSWER_SECONDS):
            replies = await asyncio.gather(*crowd)
        assert {reply.state for reply in replies} == {LeaseState.READY}


@pytest.mark.sql
@pytest.mark.parametrize("case", ["free", "stored", "refused"])
async def test_simultaneous_requests_of_one_caller_share_tries(opened, monkeypatch, case):
    """A try is a look for the artifact, and a second one before a refusal or for a new lease."""
    if case == "refused":
        monkeypatch.setattr(leases, "_MAX_HELD", 0)
    async with opened() as server:
        if case == "stored":
            assert await server.put(b"graph")
        queue, woken, tries = server.context.wait_queue, [], []
        find, wake = server.context.artifacts.find, queue.wake

        async def counted(key):
            tries.append(key)
            await asyncio.sleep(0)  # lets other requests begin meanwhile
            return await find(key)

        monkeypatch.setattr(server.context.artifacts, "find", counted)
        monkeypatch.setattr(queue, "wake", lambda each: (woken.append(each), wake(each)))
        most = server.context.database.shared_connections + 1
        async with AsyncExitStack() as taken:  # all requests begin before the first try
            for _ in range(most - 1):
                await taken.enter_async_context(server.context.leases._query_slots)
            requests = [asyncio.create_task(server.acquire(0)) for _ in range(100)]
            await asyncio.sleep(0)
        async with asyncio.timeout(_ANSWER_SECONDS):
            replies = await asyncio.gather(*requests, return_exceptions=True)
        found = Counter(getattr(each, "state", getattr(each, "code", each)) for each in replies)
    assert (
        found
        == {
            "free": {LeaseState.GRANTED: 1, LeaseState.HELD: 99},
            "stored": {LeaseState.READY: 100},
            "refused": {ErrorCode.TOO_MANY_LEASES: 100},
        }[case]
    )
    assert len(tries) <= (2 * most if case == "free" else most)
    assert len(woken) <= most


def test_answer_confirms_a_wait_unless_the_server_cuts_it_short(tmp_path, connect):
    confirmed = "Preference-Applied"
    with LiveServer(tmp_path, max_connections=2, log_level="error") as server:
        api = connect(server.url)
        assert api.acquire(wait=WAIT).headers[confirmed] == f"wait={WAIT}"  # granted in time
        assert confirmed not in api.acquire().headers
        assert api.acquire(wait=1).headers[confirmed] == "wait=1"
        with ThreadPoolExecutor(1) as callers:
            waiting = callers.submit(wait, connect(server.url, api.namespace))
            until(lambda: waiters(api) == 1)
            refused = api.acquire(wait=WAIT)  # too many waiters
            server.stop()
            stopped = waiting.result()
    for answer in (refused, stopped):
        assert answer.status_code == 202
        assert confirmed not in answer.headers


def test_waiters_leave_connections_for_the_holder(tmp_path, connect):
    with LiveServer(tmp_path, max_connections=8) as server, ThreadPoolExecutor(7) as threads:
        api = connect(server.url)
        token = api.acquire(ttl_seconds=600).json()["token"]
        answers = [threads.submit(wait, connect(server.url)) for _ in range(7)]
        until(lambda: waiters(api) == 7)
        for _ in range(3):
            assert wait(connect(server.url)).status_code == 202
        holder = connect(server.url)
        assert holder.renew(token).status_code == 200
        assert holder.put(BLOB).status_code == 201
        assert [each.result().status_code for each in answers] == [200] * 7


@pytest.mark.sql
async def test_number_of_leases_per_caller_is_limited(opened, monkeypatch):
    monkeypatch.setattr(leases, "_MAX_HELD", 3)
    async with opened() as server:
        granted = [await server.acquire(number, "one") for number in range(3)]
        with pytest.raises(ServerError) as refused:
            await server.acquire(3, "one")
        assert (refused.value.code, refused.value.limit) == (ErrorCode.TOO_MANY_LEASES, 3)
        assert (await server.acquire(3, "two")).token is not None

        await server.context.leases.release(key_of(0), token=granted[0].token)
        assert (await server.acquire(4, "one")).token is not None
        opened.clock.turn(3600)
        assert (await server.acquire(5, "one")).token is not None


@pytest.mark.sql
async def test_ended_leases_are_dropped_beyond_a_limit_and_held_ones_stay(opened, monkeypatch):
    monkeypatch.setattr(leases, "_MAX_ROWS", 6)
    async with opened() as server:
        held = await server.acquire(100, "one")
        fencing = 0
        for number in range(20):
            reply = await server.acquire(number % 10, "one")
            await server.context.leases.release(key_of(number % 10), token=reply.token)
            assert reply.fencing >= fencing
            fencing = reply.fencing
            opened.clock.turn(0.01)
        assert await count_rows(server) <= 6

        for number in range(20):
            reply = await server.acquire(number, "a roamer", f"team-{number}")
            await server.context.leases.release(key_of(number, f"team-{number}"), token=reply.token)
        assert await count_rows(server) <= 6 + 6
        await server.context.leases.renew(key_of(100), token=held.token, request=LeaseRequest())

        for number in range(200, 205):
            await server.acquire(number, f"caller {number}")
        with pytest.raises(ServerError, match="the namespace team has 6 leases"):
            await server.acquire(205, "another")


async def count_rows(server):
    async with server.context.database.reading() as connection:
        return await connection.scalar(sa.select(sa.func.count()).select_from(tables.leases))


async def until_waiting(server, count):
    async with asyncio.timeout(_ANSWER_SECONDS):
        while server.context.wait_queue.count < count:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0)


async def renewed(server, token, **request):
    return await server.context.leases.renew(
        key_of(0), token=token, request=LeaseRequest(**request)
    )
