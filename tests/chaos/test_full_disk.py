"""A disk that is full for real, with the blobs on it and, on SQLite, the database, too."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey, Digest, Namespace
from graphstash_server.keys import StoredKey
from graphstash_server.testing import ServerProcess
from support.pins import pin
from support.small_disk import SmallDisk
from support.waiting import until

pytestmark = pytest.mark.extended

MIB = 1024**2
DISK_BYTES = 32 * MIB
HEAD_ROOM_BYTES = 4 * MIB

_NONE = "0 problems found\nexit code 0"


class Api:
    """One namespace of one server."""

    def __init__(self, url: str, database_url: str) -> None:
        self._database_url = database_url
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    @staticmethod
    def key(number: int) -> dict[str, str]:
        fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
        return {"kind": "jax", "device_type": "cpu", "fingerprint": fingerprint}

    def path(self, number: int) -> str:
        return "/v1/team/artifacts/" + "/".join(self.key(number).values())

    @staticmethod
    def blob(number: int, size: int = MIB) -> bytes:
        return random.Random(number).randbytes(size)

    def put(self, number: int, size: int = MIB) -> httpx.Response:
        blob = self.blob(number, size)
        headers = {"Repr-Digest": Digest.of(blob).repr_digest}
        return self.http.put(self.path(number), content=blob, headers=headers)

    def get(self, number: int) -> httpx.Response:
        return self.http.get(self.path(number))

    def delete(self, number: int) -> httpx.Response:
        return self.http.delete(self.path(number))

    def pin(self, numbers: list[int]) -> None:
        team = Namespace("team")
        keys = [ArtifactKey(**self.key(number)) for number in numbers]
        pin(self._database_url, [StoredKey.of(team, key) for key in keys])

    def kept(self, numbers: range) -> list[int]:
        return [number for number in numbers if self.get(number).status_code == 200]


class Deployment:
    """A server on a small disk."""

    def __init__(self, disk: SmallDisk, database_url: str) -> None:
        self.disk = disk
        self._environment = {"GRAPHSTASH_MAINTENANCE_SECONDS": "3600"}
        if database_url:
            self._environment["GRAPHSTASH_DATABASE_URL"] = database_url
        self.has_sqlite = not database_url
        self._database_url = database_url
        self._opened: list[tuple[ServerProcess, Api]] = []

    def serve(self, **settings: int) -> Api:
        given = {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
        server = ServerProcess(
            self.disk.directory / "data",
            *("--min-free-bytes", str(HEAD_ROOM_BYTES), "--log-level", "error"),
            command=self.disk.command,
            environment=self._environment | given,
        )
        database = self.disk.directory / "data" / "graphstash.sqlite3"
        api = Api(server.url, self._database_url or f"sqlite:///{database}")
        self._opened.append((server, api))
        return api

    def check(self) -> str:
        """What `graphstash fsck --deep` says."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("GRAPHSTASH_")
        }
        done = subprocess.run(
            [sys.executable, "-m", "graphstash", "fsck", "--deep", "--orphans-older-than", "0s"],
            env=inherited
            | self._environment
            | {"GRAPHSTASH_DATA_DIR": str(self.disk.directory / "data")},
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{done.stdout}{done.stderr}".strip() + f"\nexit code {done.returncode}"

    def close(self) -> None:
        for server, api in self._opened:
            api.http.close()
            server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    with SmallDisk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        deployment = Deployment(disk, url)
        yield deployment
        deployment.close()


@pytest.fixture
def findings(deployment: Deployment) -> Callable[[], str]:
    """What is wrong with an artifact, a blob or a counter."""
    return deployment.check


def test_without_any_limit_a_full_disk_evicts(deployment, findings):
    api = deployment.serve()
    numbers = range(60)

    refused = [answer.text for answer in map(api.put, numbers) if answer.status_code != 201]

    assert refused == []

    kept = api.kept(numbers)
    assert 20 <= len(kept) < 32
    for number in kept:
        assert api.get(number).content == api.blob(number)
    assert findings() == _NONE

    assert evictions_of(api) == dict.fromkeys(set(numbers) - set(kept), "the disk is full")


def evictions_of(api: Api) -> dict[int, str]:
    """The artifacts that the audit log says were evicted, and why."""
    numbers = {"/".join(api.key(number).values()): number for number in range(200)}
    query = {"namespace": "team", "limit": 1000}
    answer = api.http.get("/v1/-/audit", params=query)
    assert answer.status_code == 200, answer.text
    return {
        numbers[entry["subject"]]: entry["detail"].rpartition(" ")[0]
        for entry in answer.json()["entries"]
        if entry["action"] == "evict"
    }


def test_a_budget_below_the_size_of_the_disk_never_fills_it(deployment, findings):
    api = deployment.serve(store_limit_bytes=16 * MIB)
    numbers = range(60)

    refused = [answer.text for answer in map(api.put, numbers) if answer.status_code != 201]

    assert refused == []

    assert 12 <= len(api.kept(numbers)) <= 16
    assert deployment.disk.used_bytes < DISK_BYTES - HEAD_ROOM_BYTES
    assert set(evictions_of(api).values()) <= {"over the soft limit", "over the store's limit"}
    assert set(evictions_of(api)) == set(numbers) - set(api.kept(numbers))
    assert findings() == _NONE


def test_when_nothing_can_be_evicted_reading_goes_on(deployment, findings):
    api = deployment.serve()
    numbers = list(range(20))
    for number in numbers:
        assert api.put(number).status_code == 201
    api.pin(numbers)

    number = 100
    while (answer := api.put(number)).status_code == 201:
        api.pin([number])
        numbers.append(number)
        number += 1

    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (507, "insufficient_storage")
    assert answer.headers["content-type"] == "application/problem+json"
    assert 0 <= problem["limit"] < MIB
    assert str(HEAD_ROOM_BYTES) in problem["detail"]
    assert api.get(number).status_code == 404
    for each in numbers:
        assert api.get(each).content == api.blob(each)
    assert findings() == _NONE

    for each in numbers[:2]:
        assert api.delete(each).status_code == 204
    assert api.put(number).status_code == 201
    assert findings() == _NONE


def test_a_disk_that_others_filled_is_read_only_until_there_is_room(deployment, findings):
    api = deployment.serve()
    numbers = range(12)
    for number in numbers:
        assert api.put(number).status_code == 201
    api.pin(list(numbers))

    deployment.disk.fill()

    for number in range(100, 110):
        refused = api.put(number, 1000 * (number - 99))
        assert (refused.status_code, refused.json()["code"]) == (507, "insufficient_storage")
        assert "limit" in refused.json()
    ready = api.http.get("/readyz")
    assert (ready.status_code, ready.json()["blob_store"], ready.json()["database"]) == (
        200,
        "read only: no space left",
        "ok",
    )
    for number in numbers:
        assert api.get(number).content == api.blob(number)

    deployment.disk.drain()

    assert api.put(100).status_code == 201
    until(lambda: api.http.get("/readyz").json()["blob_store"] == "ok")  # a probe is shared
    assert findings() == _NONE


def test_a_disk_that_others_filled_gets_room_by_deleting_and_by_evicting(deployment, findings):
    api = deployment.serve()
    numbers = range(20)
    for number in numbers:
        assert api.put(number).status_code == 201

    # SQLite writes down what goes before it goes; without any room it can take nothing away.
    deployment.disk.fill(left_bytes=MIB if deployment.has_sqlite else 0)

    assert api.delete(0).status_code == 204
    tries = 0
    while (answer := api.put(100)).status_code == 507:
        tries += 1
        assert tries < 10
    assert answer.status_code == 201
    assert api.get(100).content == api.blob(100)
    assert len(api.kept(numbers)) > 10
    assert findings() == _NONE
