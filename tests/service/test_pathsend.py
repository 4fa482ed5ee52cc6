"""Under a server that sends files itself (ASGI extension pathsend), blobs are left to it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey, Digest
from support.ports import reserved_port

PATH = "/v1/default/artifacts/" + str(ArtifactKey.parse("torch_xla", "cpu-x86_64", "a" * 64))
BLOB = os.urandom(3_000_000)


@pytest.fixture
def granian(tmp_path):
    port = reserved_port()
    url = f"http://127.0.0.1:{port}"
    support = Path(__file__).parents[1] / "support"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "granian", "--interface", "asgi", "--factory"),
            *("--host", "127.0.0.1", "--port", str(port), "recording_app:recording_app"),
        ],
        cwd=support,
        env=os.environ
        | {
            "GRAPHSTASH_DATA_DIR": str(tmp_path / "data"),
            "GRAPHSTASH_INSECURE": "true",
            "NOTES": str(tmp_path / "notes"),
            "PYTHONPATH": str(support),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"{url}/healthz")
            break
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield url, tmp_path / "notes"
    process.terminate()
    process.wait(30)


def test_a_whole_blob_is_sent_by_path_and_a_part_of_it_is_not(granian):
    url, notes = granian
    stored = httpx.put(
        url + PATH, content=BLOB, headers={"Repr-Digest": Digest.of(BLOB).repr_digest}, timeout=30
    )
    assert stored.status_code == 201
    whole = httpx.get(url + PATH)
    assert whole.content == BLOB
    assert notes.read_text().splitlines().count("GET http.response.pathsend") == 1

    part = httpx.get(url + PATH, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, BLOB[10:20])
    assert notes.read_text().splitlines().count("GET http.response.pathsend") == 1
