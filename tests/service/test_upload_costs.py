"""Costs of an upload, counted: calls of threads, fsyncs, and layers of the framework."""

import itertools
import re
import signal
import subprocess
from collections import Counter

from fastapi.routing import APIRoute

from graphstash_schema import Digest
from graphstash_server.storage import upload as storage_upload
from graphstash_server.testing import LiveServer, ServerProcess
from graphstash_server.threads import Threads
from support.waiting import until

BLOB = b"an executable" * 300


def test_small_upload_calls_a_thread_for_the_blob_and_one_for_the_commit(
    tmp_path, connect, monkeypatch
):
    called = []
    call = Threads.call

    def call_counted(threads, work):
        called.append(threads._name)
        return call(threads, work)

    monkeypatch.setattr(Threads, "call", call_counted)
    monkeypatch.setattr(storage_upload, "_AMPLE_SECONDS", 3600.0)  # free space is known
    with LiveServer(tmp_path, flush_seconds=60, log_level="error") as server:
        api = connect(server.url)
        assert api.put(b"the first", 1).status_code == 201
        counts = []
        for number in range(2, 7):
            called.clear()
            assert api.put(BLOB, number).status_code == 201
            counts.append([name for name in called if name.endswith("-write")])
    assert min(counts, key=len) == ["blob-write", "sqlite-write"]  # others are of chores


def test_small_upload_syncs_its_file_its_directory_and_the_databases_log(tmp_path, connect):
    """The server's other transactions, and checkpoints, sync the log and the database."""
    blobs = (b"%d" % number for number in itertools.count())
    in_one = [
        blob for blob in itertools.islice(blobs, 4000) if Digest.of(blob).sha256.startswith("00")
    ][:5]
    log = tmp_path / "calls"
    environment = {"GRAPHSTASH_FLUSH_SECONDS": "60"}
    with ServerProcess(tmp_path / "data", environment=environment) as server:
        api = connect(server.url)
        # The first upload of a process into a directory also syncs the directory's parent.
        assert api.put(in_one[0], 0).status_code == 201
        command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", str(log)]
        attached = [*command, "-p", str(server.process.pid)]
        with subprocess.Popen(attached, stderr=subprocess.PIPE, text=True) as strace:
            assert "attached" in strace.stderr.readline()
            for number, blob in enumerate(in_one[1:], 1):
                assert api.put(blob, number).status_code == 201
            strace.send_signal(signal.SIGINT)
            strace.communicate()
        until(log.exists)
    synced = Counter(
        "log" if path.endswith("-wal") else path.split("/")[-2]
        for path in re.findall(r"f(?:data)?sync\(\d+<(.*?)>", log.read_text())
    )
    assert synced["tmp"] == 4, synced
    assert synced["sha256"] == 4, synced
    assert synced["log"] >= 4, synced


def test_call_is_handled_without_fastapis_routes(api, monkeypatch):
    handled = []
    handle = APIRoute.handle

    async def handle_counted(route, scope, receive, send):
        handled.append(route.path)
        await handle(route, scope, receive, send)

    monkeypatch.setattr(APIRoute, "handle", handle_counted)
    assert api.put(BLOB).status_code == 201
    assert api.http.get(api.path(), headers={"Unknown": "header"}).content == BLOB
    assert api.http.put(f"{api.path()}x", content=b"").status_code == 400
    assert handled == []
    assert api.http.patch(api.path()).status_code == 405
