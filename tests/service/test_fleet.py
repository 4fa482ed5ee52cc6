"""Four server processes on one PostgreSQL, and sixty-four clients that want one cold key."""

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey, Digest
from graphstash_server.testing import ServerProcess
from support.waiting import until, until_waiting

CLIENTS = 64
KEY = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "e" * 64)
BLOB = os.urandom(200_000)


@pytest.fixture(scope="module")
def database(postgres):
    return postgres.new_database()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, database, process_environment):
    data_dir = tmp_path_factory.mktemp("fleet") / "data"
    environment = {**process_environment, "GRAPHSTASH_DATABASE_URL": database}
    servers = [
        ServerProcess(data_dir, "--min-free-bytes", "0", environment=environment) for _ in range(4)
    ]
    yield servers
    for server in servers:
        server.stop()


class Client:
    """One host of a training job: asks for the artifact, compiles when it is told to."""

    def __init__(self, http, url, *, compile_seconds=1.0, ttl_seconds=30.0):
        self.http = http
        self.lease = f"{url}/leases/{KEY}"
        self.artifact = f"{url}/artifacts/{KEY}"
        self.compile_seconds = compile_seconds
        self.ttl_seconds = ttl_seconds
        self.granted = None
        self.ready_at = None
        self.published_at = None
        self.blob = None

    async def run(self):
        while True:
            reply = await self.ask()
            if reply.status_code == 200:
                self.ready_at = time.monotonic()
                break
            if reply.status_code == 201:
                self.granted = reply.json()
                await asyncio.sleep(self.compile_seconds)
                await self.publish()
                break
            assert reply.status_code == 202, reply.text
        self.blob = (await self.http.get(self.artifact)).content

    async def ask(self):
        return await self.http.post(
            self.lease, json={"ttl_seconds": self.ttl_seconds}, headers={"Prefer": "wait=20"}
        )

    async def publish(self):
        headers = {"Repr-Digest": Digest.of(BLOB).repr_digest}
        answer = await self.http.put(self.artifact, content=BLOB, headers=headers)
        assert answer.status_code == 201, answer.text
        self.published_at = time.monotonic()


async def herd(fleet, namespace, **options):
    async with httpx.AsyncClient(
        timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:
        clients = [
            Client(http, f"{fleet[number % len(fleet)].url}/v1/{namespace}", **options)
            for number in range(CLIENTS)
        ]
        await asyncio.gather(*(client.run() for client in clients))
        return clients


def test_one_of_64_compiles_and_the_others_get_its_artifact(fleet):
    clients = asyncio.run(herd(fleet, "herd"))

    compiled = [client for client in clients if client.granted]
    assert len(compiled) == 1
    assert {client.blob for client in clients} == {BLOB}
    delays = [client.ready_at - compiled[0].published_at for client in clients if client.ready_at]
    assert len(delays) == CLIENTS - 1
    print(
        f"waiters were told {statistics.median(delays) * 1000:.0f} ms after the commit was "
        f"answered (median), the last one {max(delays) * 1000:.0f} ms"
    )


def test_the_fleet_counts_one_put_and_no_conflict(fleet, connect):
    asyncio.run(herd(fleet, "counted"))

    api = connect(fleet[0].url, "counted")
    until(lambda: api.stats()["hits"] == CLIENTS)  # the counters lag by a flush
    found = api.stats()
    assert (found["puts"], found["conflicts"], found["artifacts"]) == (1, 0, 1)


def test_a_holder_that_is_killed_is_followed_by_exactly_one_waiter(fleet, postgres, database):
    """The holder asks for the lease, and never speaks again."""
    url = fleet[0].url + f"/v1/killed/leases/{KEY}"
    first = httpx.post(url, json={"ttl_seconds": 2}).json()
    granted_at = time.monotonic()

    clients = asyncio.run(herd(fleet, "killed", ttl_seconds=30))

    followers = [client for client in clients if client.granted]
    assert len(followers) == 1
    assert followers[0].granted["fencing"] > first["fencing"]
    took = followers[0].published_at - followers[0].compile_seconds - granted_at
    print(f"the next waiter was granted the lease {took:.1f} s after a grant of 2 s")
    assert {client.blob for client in clients} == {BLOB}


def test_a_failed_compilation_wakes_a_waiter_of_another_server(fleet):
    path = f"/v1/failed/leases/{KEY}"
    lease = httpx.post(fleet[0].url + path, json={"ttl_seconds": 600}).json()

    async def test():
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            waiting = asyncio.create_task(
                http.post(fleet[3].url + path, json={}, headers={"Prefer": "wait=50"})
            )
            await asyncio.to_thread(until_waiting, fleet[3].url)
            await http.delete(
                fleet[0].url + path,
                params={"outcome": "failed"},
                headers={"Graphstash-Lease": lease["token"]},
            )
            return await waiting

    assert asyncio.run(test()).status_code == 201


def test_waiters_that_hang_up_disturb_no_one_else(fleet):
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
            for task in asked[:3]:
                task.cancel()
            await asyncio.gather(*asked[:3], return_exceptions=True)
            renewed = await http.put(
                fleet[0].url + path, json={}, headers={"Graphstash-Lease": lease["token"]}
            )
            await http.delete(
                fleet[1].url + path,
                params={"outcome": "failed"},
                headers={"Graphstash-Lease": lease["token"]},
            )
            return renewed, await asked[3]

    renewed, last = asyncio.run(test())
    assert renewed.status_code == 200
    assert last.status_code == 201


def test_waiters_are_served_when_notifications_stopped(fleet, postgres, database):
    """Whoever waits looks by itself, too: here every listening connection is cut all the time."""
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"

    async def test():
        stop = asyncio.Event()

        async def cutting():
            while not stop.is_set():
                await asyncio.to_thread(postgres.execute, cut)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(cutting())
        clients = await herd(fleet, "deaf")
        stop.set()
        await task
        return clients

    clients = asyncio.run(test())
    assert sum(client.granted is not None for client in clients) == 1
    assert {client.blob for client in clients} == {BLOB}


def test_servers_come_back_after_their_database_did(fleet, postgres):
    path = f"/v1/restart/artifacts/{KEY}"
    headers = {"Repr-Digest": Digest.of(BLOB).repr_digest}
    assert httpx.put(fleet[0].url + path, content=BLOB, headers=headers).status_code == 201

    postgres.kill()
    refused = httpx.get(fleet[1].url + f"/v1/restart/artifacts/{KEY}")
    ready = httpx.get(fleet[1].url + "/readyz")
    postgres.start()

    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert json.loads(refused.text)["retryable"] is True
    assert ready.status_code == 503
    for server in fleet:
        assert httpx.get(server.url + path).content == BLOB
        assert httpx.get(server.url + "/readyz").status_code == 200


def test_the_database_has_no_connection_more_than_it_may(fleet, postgres, database):
    counted = postgres.execute(
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{Path(database).name}'"
    )
    assert counted[0][0] <= 4 * (5 + 1)
