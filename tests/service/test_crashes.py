"""A server that is killed in every phase: the acknowledged is there, whole; the rest is not."""

import hashlib
import socket
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from graphstash_schema import Digest
from support.waiting import until

LARGE = bytes(range(256)) * 40_000  # 10 MB

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


def raw(server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=20)


def test_a_kill_during_an_upload_leaves_nothing(start, connect, stored_files, eventually):
    server = start()
    api = connect(server.url)
    api.put(b"acknowledged", 1)
    head = (
        f"PUT {api.path(2)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(LARGE)}\r\n"
        f"Repr-Digest: {Digest.of(LARGE).repr_digest}\r\n\r\n"
    )
    with raw(server) as connection:
        connection.sendall(head.encode() + LARGE[: len(LARGE) // 2])
        eventually(lambda: len(stored_files(server.data_dir)) == 2)
        server.kill()

    again = connect(start().url)

    assert again.get(1).content == b"acknowledged"
    assert again.get(2).status_code == 404
    assert [path.name for path in stored_files(server.data_dir)] == [
        Digest.of(b"acknowledged").sha256
    ]
    assert again.put(LARGE, 2).status_code == 201
    assert again.get(2).content == LARGE


def test_a_kill_during_a_download_never_looks_like_a_whole_artifact(start, connect):
    server = start()
    api = connect(server.url)
    api.put(LARGE)

    received: list[int] = []

    def read_on(answer: httpx.Response) -> None:
        for chunk in answer.iter_raw(65536):
            received.append(len(chunk))
            if len(received) == 1:
                server.kill()

    with (
        api.http.stream("GET", api.path()) as answer,
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
    ):
        read_on(answer)
    assert 0 < sum(received) < len(LARGE)


def test_a_kill_between_rename_and_commit_leaves_no_orphan(
    start, connect, stored_files, eventually
):
    server = start(command=(sys.executable, "-c", KILLED_AFTER_PUT))
    api = connect(server.url)
    with pytest.raises(httpx.TransportError):
        api.put(b"never acknowledged")
    assert len(stored_files(server.data_dir)) == 1

    again = connect(start().url)

    assert again.get().status_code == 404
    eventually(lambda: stored_files(server.data_dir) == [])
    assert again.put(b"never acknowledged").status_code == 201


def is_compared(database):
    """Whether a server has claimed the last chore of a round."""
    claimed = database.execute("SELECT name FROM chores").fetchall()
    return ("compare rows and blobs",) in claimed


def test_a_server_that_is_not_alone_leaves_young_blobs_alone(
    start, connect, stored_files, eventually
):
    """The blob may belong to an upload of the other server that is about to commit."""
    first = start()
    crashing = start(command=(sys.executable, "-c", KILLED_AFTER_PUT))
    with pytest.raises(httpx.TransportError):
        connect(crashing.url).put(b"never acknowledged")

    database = sqlite3.connect(first.data_dir / "graphstash.sqlite3", timeout=60)
    eventually(lambda: is_compared(database))
    with database:
        database.execute("DELETE FROM chores")

    second = start()
    api = connect(second.url)
    eventually(lambda: is_compared(database))  # its first round has come that far
    database.close()

    assert len(stored_files(first.data_dir)) == 1
    assert api.get().status_code == 404


def test_what_was_acknowledged_under_load_survives_a_kill(start, connect, stored_files, writers):
    server = start()
    with writers([connect(server.url) for _ in range(8)]) as acknowledged:
        until(lambda: len(acknowledged) >= 100)
        server.kill()

    again = connect(start().url)

    assert len(acknowledged) > 10
    for number, blob in acknowledged.items():
        assert again.get(number).content == blob
    stats = again.stats()
    assert stats["artifacts"] >= len(acknowledged)
    assert not [path for path in stored_files(server.data_dir) if path.parent.name == "tmp"]


def test_rows_whose_blobs_were_lost_are_dropped_after_a_start(
    start, connect, stored_files, eventually
):
    server = start()
    api = connect(server.url)
    for number in range(5):
        api.put(f"blob {number}".encode(), number)
    server.stop()
    for path in stored_files(server.data_dir)[:2]:
        path.unlink()

    again = connect(start().url)

    eventually(lambda: again.stats()["artifacts"] == 3)
    found = [again.get(number).status_code for number in range(5)]
    assert sorted(found) == [200, 200, 200, 404, 404]


def test_two_servers_share_one_data_directory(start, connect, stored_files):
    first, second = (connect(start().url) for _ in range(2))

    first.put(b"shared", 1)
    assert second.get(1).content == b"shared"
    assert second.put(b"other", 1).status_code == 409
    assert second.put(b"shared", 1).status_code == 200
    assert second.http.delete(second.path(1)).status_code == 204
    assert first.get(1).status_code == 404


def test_two_servers_that_start_at_once_both_come_up(start, connect):
    with ThreadPoolExecutor(3) as pool:
        servers = list(pool.map(lambda _: start(), range(3)))

    ready = [connect(server.url).http.get("/readyz") for server in servers]
    assert [answer.status_code for answer in ready] == [200] * 3


def test_counters_outlive_a_graceful_stop(start, connect):
    server = start()
    api = connect(server.url)
    api.put(b"x", seconds=3)
    api.get()
    server.stop()

    stats = connect(start().url).stats()

    assert (stats["hits"], stats["saved_seconds"], stats["served_bytes"]) == (1, 3, 1)


def test_memory_stays_flat_while_large_artifacts_stream(start, connect):
    """256 MiB up and down again; the process must not hold them."""
    size = 256 * 1024**2
    piece = bytes(range(256)) * 4096
    server = start()
    api = connect(server.url)
    api.put(piece, 1)
    api.get(1)
    hasher = hashlib.sha256()
    for _ in range(size // len(piece)):
        hasher.update(piece)
    digest = Digest(hasher.hexdigest(), size)
    before = server.resident_bytes
    peak = before

    def pieces():
        nonlocal peak
        for number in range(size // len(piece)):
            if number % 16 == 0:
                peak = max(peak, server.resident_bytes)
            yield piece

    stored = api.http.put(
        api.path(2),
        content=pieces(),
        headers={"Content-Length": str(size), "Repr-Digest": digest.repr_digest},
    )
    assert stored.status_code == 201, stored.text
    received = hashlib.sha256()
    with api.http.stream("GET", api.path(2)) as answer:
        for number, chunk in enumerate(answer.iter_raw(1024**2)):
            received.update(chunk)
            if number % 16 == 0:
                peak = max(peak, server.resident_bytes)

    assert received.hexdigest() == digest.sha256
    assert peak - before < 50 * 1024**2
