"""A disk that is full for real, with the blobs on it and, on SQLite, the database, too."""

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from graphstash_server.keys import StoredKey
from graphstash_server.testing import ServerProcess
from support.api import Api
from support.pins import pin
from support.small_disk import SmallDisk
from support.waiting import until

pytestmark = pytest.mark.extended

MIB = 1024**2
DISK_BYTES = 32 * MIB
HEAD_ROOM_BYTES = 4 * MIB


class DiskApi(Api):
    """One namespace of one server; numbers say what is stored."""

    def __init__(self, url: str, database_url: str) -> None:
        super().__init__(url)
        self._database_url = database_url

    def fingerprint(self, number: int) -> str:
        return f"{number:064x}"

    @staticmethod
    def blob(number: int, size: int = MIB) -> bytes:
        return random.Random(number).randbytes(size)

    def store(self, number: int, size: int = MIB) -> httpx.Response:
        return self.put(self.blob(number, size), number)

    def put_all(self, numbers: Iterable[int]) -> None:
        """Store artifacts, each of which the server accepts."""
        refused = [answer.text for answer in map(self.store, numbers) if answer.status_code != 201]
        assert refused == []

    def has(self, numbers: Iterable[int]) -> bool:
        """Return whether each artifact is served as it was stored."""
        return all(self.get(number).content == self.blob(number) for number in numbers)

    def pin(self, numbers: Iterable[int]) -> None:
        named = [
            StoredKey.parse(namespace=self.namespace, **self.key(number)) for number in numbers
        ]
        pin(self._database_url, named)

    def kept(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self.get(number).status_code == 200]

    def evictions(self) -> dict[int, str]:
        """Return the artifacts that the audit log says were evicted, and why."""
        answer = self.http.get("/v1/-/audit", params={"namespace": "team", "limit": 1000})
        assert answer.status_code == 200, answer.text
        return {
            int(entry["subject"].rpartition("/")[2], 16): entry["detail"].rpartition(" ")[0]
            for entry in answer.json()["entries"]
            if entry["action"] == "evict"
        }


class Deployment:
    """A server on a small disk."""

    def __init__(self, disk: SmallDisk, database_url: str) -> None:
        self.disk = disk
        self._environment = {"GRAPHSTASH_MAINTENANCE_SECONDS": "3600"}
        if database_url:
            self._environment["GRAPHSTASH_DATABASE_URL"] = database_url
        self.has_sqlite = not database_url
        self._database_url = database_url

    def serve(self) -> DiskApi:
        self._server = ServerProcess(
            self.disk.directory / "data",
            *("--min-free-bytes", str(HEAD_ROOM_BYTES), "--log-level", "error"),
            command=self.disk.command,
            environment=self._environment,
        )
        database = self.disk.directory / "data" / "graphstash.sqlite3"
        self._api = DiskApi(self._server.url, self._database_url or f"sqlite:///{database}")
        return self._api

    def check(self) -> str:
        """What `graphstash fsck --deep` says."""
        done = subprocess.run(
            [sys.executable, "-m", "graphstash", "fsck", "--deep", "--orphans-older-than", "0s"],
            env=os.environ
            | self._environment
            | {"GRAPHSTASH_DATA_DIR": str(self.disk.directory / "data")},
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{done.stdout}{done.stderr}".strip() + f"\nexit code {done.returncode}"

    def close(self) -> None:
        self._api.close()
        self._server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    url = ""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    with SmallDisk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        deployment = Deployment(disk, url)
        yield deployment
        assert deployment.check() == "0 problems found\nexit code 0"
        deployment.close()


@pytest.mark.parametrize("deployment", ["sqlite"], indirect=True)
def test_without_any_limit_a_full_disk_evicts(deployment):
    api = deployment.serve()
    api.put_all(range(60))
    kept = api.kept(range(60))
    assert 20 <= len(kept) < 32
    assert api.has(kept)
    assert api.evictions() == dict.fromkeys({*range(60)} - {*kept}, "the disk is full")


def test_disk_filled_by_others_is_read_only_until_artifacts_go(deployment):
    api = deployment.serve()
    api.put_all(range(12))
    api.pin(range(12))
    deployment.disk.fill()
    for number in range(100, 110):
        refused = api.store(number, 1000 * (number - 99))
        assert (refused.status_code, refused.json()["code"]) == (507, "insufficient_storage")
        assert "limit" in refused.json()
    ready = api.http.get("/readyz")
    assert (ready.status_code, ready.json()["blob_store"], ready.json()["database"]) == (
        200,
        "read only: no space left",
        "ok",
    )
    assert api.has(range(12))

    deployment.disk.drain()
    api.put_all(range(12, 20))
    until(lambda: api.http.get("/readyz").json()["blob_store"] == "ok")  # a probe is shared

    # SQLite writes down what goes before it goes; without any room it can take nothing away.
    deployment.disk.fill(left_bytes=MIB if deployment.has_sqlite else 0)
    assert api.delete(0).status_code == 204
    tries = 0
    while (answer := api.store(100)).status_code == 507:
        tries += 1
        assert tries < 10
    assert answer.status_code == 201
    assert api.has([*range(1, 12), 100])
