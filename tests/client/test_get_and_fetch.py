"""What a large artifact costs: memory of its process, and passes of SHA-256 over its bytes."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from graphstash_schema import ArtifactMetadata
from support.host import key

MIB = 1024**2
PAYLOAD_BYTES = 64 * MIB
JOB = Path(__file__).parents[1] / "support" / "fetch_job.py"


def noise(size):
    return random.Random(size).randbytes(size)


PAYLOADS = {
    "does not shrink": lambda: noise(PAYLOAD_BYTES),
    "shrinks to a sixteenth": lambda: noise(4 * MIB) * 16,
}


def publish(stash, number, payload):
    metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=len(payload))
    return stash.put(key(number), payload, metadata)


@pytest.fixture(scope="module")
def payloads():
    return {name: make() for name, make in PAYLOADS.items()}


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize(
    ("call", "most"), [("get", 1.1 * PAYLOAD_BYTES), ("fetch", 32 * MIB)], ids=["get", "fetch"]
)
def test_a_large_artifact_takes_little_memory_beside_itself(
    hosts, config, payloads, tmp_path, name, call, most
):
    publish(hosts("publisher"), 1, b"small")
    publish(hosts("publisher"), 2, payloads[name])
    settings = {
        "url": config().url,
        "namespace": config().namespace,
        "cache_dir": str(tmp_path / "reader"),
        "keys": [str(key(1)), str(key(2))],
    }
    (tmp_path / "reader").mkdir(mode=0o700)

    for _ in ("from the server", "from this host's disk"):
        done = subprocess.run(
            [sys.executable, JOB, json.dumps(settings), call],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["sha256"] == hashlib.sha256(payloads[name]).hexdigest()
        assert told["grown"] < most


class Counted:
    """hashlib's SHA-256, which adds up what is hashed."""

    total = 0
    real = staticmethod(hashlib.sha256)

    def __init__(self, data=b""):
        self._hash = Counted.real()
        self.update(data)
        self.digest_size = self._hash.digest_size

    def update(self, data):
        Counted.total += memoryview(data).nbytes
        self._hash.update(data)

    def hexdigest(self):
        return self._hash.hexdigest()

    def digest(self):
        return self._hash.digest()


@pytest.fixture
def hashed(monkeypatch):
    """Calls a function; how many bytes went through SHA-256 meanwhile."""

    def count(action):
        monkeypatch.setattr(hashlib, "sha256", Counted)
        before = Counted.total
        action()
        monkeypatch.undo()
        return Counted.total - before

    return count


SLACK_BYTES = 64 * 1024
"""Keys, statements and tokens are hashed, too."""


def test_a_download_is_hashed_once_as_it_comes(hosts, hashed):
    payload = noise(8 * MIB)
    sent = publish(hosts("publisher"), 1, payload)
    reader = hosts("reader")
    assert abs(hashed(lambda: reader.get(key(1))) - sent) < SLACK_BYTES
    assert abs(hashed(lambda: reader.get(key(1))) - len(payload)) < SLACK_BYTES


def test_a_signed_artifact_is_hashed_once_from_the_server_and_once_from_disk(hosts, team, hashed):
    team.trust("ci")
    payload = noise(8 * MIB)
    sent = publish(hosts("publisher", signing_key=team.key("ci")), 1, payload)
    reader = hosts("reader", trusted_keys=team.file)
    for _ in ("server", "disk"):
        assert abs(hashed(lambda: reader.get(key(1))) - sent) < SLACK_BYTES
