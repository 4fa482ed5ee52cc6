"""Under a server that sends files itself (ASGI extension pathsend), blobs are left to it."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from graphstash_schema import ArtifactKey, Digest
from support.ports import reserved_port
from support.waiting import until

PATH = "/v1/default/artifacts/" + str(ArtifactKey.parse("torch_xla", "cpu-x86_64", "a" * 64))
BLOB = os.urandom(3_000_000)


@pytest.fixture
def granian(tmp_path):
    port = reserved_port()
    url = f"http://127.0.0.1:{port}"
    support = Path(__file__).parents[1] / "support"
    variables = {
        "GRAPHSTASH_DATA_DIR": str(tmp_path / "data"),
        "GRAPHSTASH_INSECURE": "true",
        "NOTES": str(tmp_path / "notes"),
        "PYTHONPATH": os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")]),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "granian", "--interface", "asgi", "--factory"),
                *("--host", "127.0.0.1", "--port", str(port), "recording_app:recording_app"),
            ],
            cwd=support,
            env=os.environ | variables,
            stdout=log,
            stderr=log,
        )

    def is_up():
        assert process.poll() is None, (tmp_path / "log").read_text()
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/healthz").is_success

    until(is_up)
    yield url, tmp_path / "notes"
    process.terminate()
    process.wait(30)


@pytest.mark.extended
def test_whole_blob_is_sent_by_path_and_range_is_not(granian):
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
