"""A server that is killed in any phase keeps acknowledged uploads whole, and no others."""

import os
import signal
import socket
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_server.testing import LiveServer, ServerProcess
from support.meter import Meter
from support.tiers import most_extended
from support.waiting import until
from support.wire import Wire, put_head

LARGE = bytes(range(256)) * 80_000
"""20 MB, more than the buffers of a connection."""

KILLED_AFTER_PUT = """
import asyncio, os, signal, sys
from graphstash_server.storage import DiskBlobStore

store_one = DiskBlobStore.put

async def put(self, digest, chunks):
    await store_one(self, digest, chunks)
    os.kill(os.getpid(), signal.SIGKILL)

DiskBlobStore.put = put
from graphstash_server.__main__ import main
main()
"""


def refuses_connections(server):
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=5):
        return False
    return True


def interrupt_twice(server):
    """End a server that waits for a client that reads nothing."""
    server.process.send_signal(signal.SIGINT)
    until(lambda: refuses_connections(server))
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


def test_forced_stop_writes_each_hit_once(start, connect):
    server = start(
        environment={"GRAPHSTASH_SHUTDOWN_SECONDS": "3600", "GRAPHSTASH_FLUSH_SECONDS": "60"}
    )
    api = connect(server.url)
    api.put(LARGE, 1)
    api.put(b"blob", 2)
    for _ in range(3):
        assert api.get(2).content == b"blob"
    with api.http.stream("GET", api.path(1)) as answer:
        next(answer.iter_raw())
        interrupt_twice(server)
    assert connect(start().url).stats()["hits"] == 4


@pytest.mark.parametrize(
    "end", most_extended([ServerProcess.kill, interrupt_twice], quick=[ServerProcess.kill])
)
def test_end_under_load_keeps_acknowledged_artifacts_only(
    start, connect, stored_files, writers, end
):
    server = start(environment={"GRAPHSTASH_SHUTDOWN_SECONDS": "3600"})
    api = connect(server.url, "large")
    api.put(LARGE, 1)
    with (
        writers([connect(server.url) for _ in range(8)]) as acknowledged,
        Wire(server.url) as half_sent,
        api.http.stream("GET", api.path(1)) as answer,
    ):
        half_sent.send(put_head(api.path(2), Digest.of(LARGE + b"x")) + LARGE[: len(LARGE) // 2])
        until(lambda: len(acknowledged) >= 100)
        chunks = answer.iter_raw()
        next(chunks)
        end(server)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            list(chunks)

    again = start()
    small, large = connect(again.url), connect(again.url, "large")
    for number, blob in acknowledged.items():
        assert small.get(number).content == blob
    assert small.stats()["artifacts"] >= len(acknowledged)
    assert large.get(1).content == LARGE
    assert large.get(2).status_code == 404
    assert not [path for path in stored_files(server.data_dir) if path.parent.name == "tmp"]
    # The server deletes blobs whose commit the kill prevented after its start.
    until(lambda: len(stored_files(server.data_dir)) == small.stats()["artifacts"] + 1)
    assert large.put(LARGE + b"x", 2).status_code == 201


def is_compared(database):
    """Return whether a server has claimed the last chore of a round."""
    claimed = database.execute("SELECT name FROM chores").fetchall()
    return ("compare rows and blobs",) in claimed


def test_orphan_of_kill_before_commit_is_removed_by_next_sole_server(
    start, connect, stored_files, tmp_path
):
    """While another server runs, the blob may belong to an upload that is about to commit."""
    data_dir = tmp_path / "data"
    with LiveServer(data_dir) as first:
        assert connect(first.url).put(b"acknowledged", 1).status_code == 201
        crashing = start(command=(sys.executable, "-c", KILLED_AFTER_PUT))
        with pytest.raises(httpx.TransportError):
            connect(crashing.url).put(b"never acknowledged")
        with closing(sqlite3.connect(data_dir / "graphstash.sqlite3", timeout=60)) as database:
            until(lambda: is_compared(database))
            with database:
                database.execute("DELETE FROM chores")
            with LiveServer(data_dir) as second:
                until(lambda: is_compared(database))  # its first round reaches the chore
                assert len(stored_files(data_dir)) == 2
                assert connect(second.url).get().status_code == 404

    with LiveServer(data_dir) as server:
        alone = connect(server.url)
        until(lambda: len(stored_files(data_dir)) == 1)
        assert alone.get().status_code == 404
        assert alone.put(b"never acknowledged").status_code == 201


@pytest.mark.parametrize("others", [2, pytest.param(0, marks=pytest.mark.extended)])
def test_start_with_another_database_deletes_no_blob(
    start, connect, stored_files, tmp_path, others
):
    url = f"sqlite+aiosqlite:///{tmp_path / 'other.sqlite3'}"
    for where, count, settings in (("data", 5, {}), ("elsewhere", others, {"database_url": url})):
        with LiveServer(tmp_path / where, **settings) as server:
            for number in range(count):
                blob = f"{where} {number}".encode()
                assert connect(server.url).put(blob, number).status_code == 201
    before = set(stored_files(tmp_path / "data"))
    for path in before:
        os.utime(path, (0, 0))  # too old for an upload in progress

    other = {"GRAPHSTASH_DATABASE_URL": url, "GRAPHSTASH_METRICS": "open"}
    server = start("--workers", "2", environment=other)
    api = connect(server.url)

    until(lambda: "5 of 5 blobs" in api.http.get("/readyz").json()["unknown_blobs"])
    assert "graphstash_blobs_unknown 1.0" in api.http.get("/metrics").text
    assert "5 of 5 blobs have no artifact in this database" in server.log
    assert set(stored_files(server.data_dir)) == before
    assert api.stats().get("artifacts", 0) == others


def test_blobs_absent_from_one_start_cost_no_artifact_and_no_blob(connect, stored_files, tmp_path):
    """One start misses a part of the blob store, and a job then reads one of its artifacts."""
    data_dir, away = tmp_path / "data", tmp_path / "away"
    blobs = [f"blob {number}".encode() for number in range(10)]
    with LiveServer(data_dir) as server:
        for number, blob in enumerate(blobs):
            assert connect(server.url).put(blob, number).status_code == 201
    moved = stored_files(data_dir)[:3]
    away.mkdir()
    for path in moved:
        path.rename(away / path.name)
    lost = [Digest.of(blob).sha256 for blob in blobs].index(moved[0].name)

    with LiveServer(data_dir, metrics="open") as server:
        api = connect(server.url)
        until(lambda: "3 of 10 blobs" in api.http.get("/readyz").json()["unknown_blobs"])
        assert "graphstash_blobs_unknown 1.0" in api.http.get("/metrics").text
        assert api.get(lost).status_code == 404

    for path in moved:
        (away / path.name).rename(path)
    with closing(sqlite3.connect(data_dir / "graphstash.sqlite3", timeout=60)) as database:
        with database:
            database.execute("DELETE FROM chores")
        with LiveServer(data_dir) as server:
            until(lambda: is_compared(database))  # after the comparison of the start
            api = connect(server.url)
            assert api.http.get("/readyz").json()["unknown_blobs"] == "ok"
            found = [api.get(number).status_code for number in range(10)]
            assert found == [200] * 10
            assert len(stored_files(data_dir)) == 10


def test_servers_started_at_once_share_a_data_directory_and_its_counters(
    connect, stored_files, tmp_path
):
    servers = [LiveServer(tmp_path, auto_migrate=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(LiveServer.start, servers))
    first, second = (connect(server.url) for server in servers)
    assert [each.http.get("/readyz").status_code for each in (first, second)] == [200, 200]

    for number in range(6):
        first.put(b"blob %d" % number, number, seconds=3)
    assert second.get().content == b"blob 0"
    assert second.put(b"other").status_code == 409
    assert second.put(b"blob 0").status_code == 200
    assert second.delete(5).status_code == 204
    # Maintenance of either server may be deleting the blob, which `first` serves for two seconds.
    until(lambda: first.get(5).status_code == 404)
    for server in servers:
        server.stop()
    stored_files(tmp_path)[0].unlink()

    with LiveServer(tmp_path) as server:
        again = connect(server.url)
        stats = again.stats()
        assert (stats["hits"], stats["saved_seconds"], stats["served_bytes"]) == (1, 3, 6)
        found = [again.get(number).status_code for number in range(5)]
        assert sorted(found) == [200, 200, 200, 200, 404]


@pytest.mark.extended
def test_memory_stays_flat_while_large_artifacts_stream(start, connect):
    """The server streams 96 MiB in each direction without holding them in memory."""
    blob = bytes(range(256)) * 4096 * 96
    server = start()
    api = connect(server.url)
    for number, warm_up in enumerate((b"small", LARGE)):
        api.put(warm_up, number)
        api.get(number)
    with Meter(server).measured() as cost:
        assert api.put(blob, 2).status_code == 201
        assert api.get(2).content == blob
    assert cost.memory_mib < 50
