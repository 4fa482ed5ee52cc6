"""Three server processes on one PostgreSQL, and many clients that request one cold key."""

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey
from graphstash_server.testing import ServerProcess
from support.api import digest_header
from support.waiting import until, until_waiting

SERVERS = 3
KEY = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "e" * 64)
BLOB = os.urandom(200_000)


@pytest.fixture(scope="module")
def database(postgres):
    return postgres.new_database()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, database, process_environment):
    data_dir = tmp_path_factory.mktemp("fleet") / "data"
    environment = process_environment | {"GRAPHSTASH_DATABASE_URL": database}
    with ExitStack() as stack:
        yield [
            stack.enter_context(ServerProcess(data_dir, environment=environment))
            for _ in range(SERVERS)
        ]


async def client(http, url):
    """One host of a job. Return whether it was granted the lease and compiled, and its artifact."""
    lease, artifact = f"{url}/leases/{KEY}", f"{url}/artifacts/{KEY}"
    status = 202
    while status == 202:
        reply = await http.post(lease, json={}, headers={"Prefer": "wait=20"})
        status = reply.status_code
    if status == 201:
        await asyncio.sleep(0.3)  # compiles
        answer = await http.put(artifact, content=BLOB, headers=digest_header(BLOB))
        assert answer.status_code == 201, answer.text
    return status == 201, (await http.get(artifact)).content


async def herd(fleet, namespace, count=12):
    """Return how many clients compiled. Every client ends with the artifact."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as http:
        urls = (f"{fleet[number % SERVERS].url}/v1/{namespace}" for number in range(count))
        found = await asyncio.gather(*(client(http, url) for url in urls))
    assert {blob for _, blob in found} == {BLOB}
    return sum(has_compiled for has_compiled, _ in found)


def test_failure_wakes_waiter_of_another_server_despite_hung_up_waiters(fleet):
    """Cancelling a waiter cancels neither the holder nor another waiter."""
    path = f"/v1/cancelled/leases/{KEY}"
    lease = httpx.post(fleet[0].url + path, json={"ttl_seconds": 600}).json()

    async def test():
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            asked = [
                asyncio.create_task(
                    http.post(server.url + path, json={}, headers={"Prefer": "wait=50"})
                )
                for server in fleet
            ]
            for server in fleet:
                await asyncio.to_thread(until_waiting, server.url)
            for task in asked[:-1]:
                task.cancel()
            await asyncio.gather(*asked[:-1], return_exceptions=True)
            renewed = await http.put(
                fleet[0].url + path, json={}, headers={"Graphstash-Lease": lease["token"]}
            )
            await http.delete(
                fleet[1].url + path,
                params={"outcome": "failed"},
                headers={"Graphstash-Lease": lease["token"]},
            )
            return renewed, await asked[-1]

    renewed, last = asyncio.run(test())
    assert renewed.status_code == 200
    assert last.status_code == 201


def test_waiters_are_served_without_notifications(fleet, postgres, connect):
    """Waiters also poll. This test cuts every listening connection again and again."""
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"

    async def test():
        stop = asyncio.Event()

        async def cutting():
            while not stop.is_set():
                await asyncio.to_thread(postgres.execute, cut)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(cutting())
        granted = await herd(fleet, "deaf")
        stop.set()
        await task
        return granted

    assert asyncio.run(test()) == 1
    api = connect(fleet[0].url, "deaf")
    until(lambda: api.stats()["hits"] == 12)  # the server flushes counters with a delay
    found = api.stats()
    assert (found["puts"], found["conflicts"], found["artifacts"]) == (1, 0, 1)


def test_servers_recover_with_their_database(fleet, postgres, connect, problem):
    apis = [connect(server.url, "restart") for server in fleet]
    assert apis[0].put(BLOB).status_code == 201

    postgres.kill()
    refused, ready = apis[1].get(), apis[1].http.get("/readyz")
    postgres.start()

    assert problem(refused, 503, "unavailable")["retryable"]
    assert refused.headers["retry-after"]
    assert ready.status_code == 503
    for api in apis:
        assert api.get().content == BLOB
        assert api.http.get("/readyz").status_code == 200


@pytest.mark.extended
def test_connections_to_database_stay_within_limit_under_load(fleet, postgres, database):
    query = (
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{Path(database).name}' "
        "AND backend_type = 'client backend'"  # autovacuum comes and goes
    )

    async def test():
        working = asyncio.create_task(herd(fleet, "connections", count=60))
        counted = []
        while not working.done():
            ((count,),) = await asyncio.to_thread(postgres.execute, query)
            counted.append(count)
        await working
        return counted

    assert SERVERS < max(asyncio.run(test())) <= SERVERS * (5 + 1)
