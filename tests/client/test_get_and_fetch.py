"""Peak memory of a process that gets or fetches a large artifact."""

import hashlib
import json
import random
import subprocess
import sys

import pytest

from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactMetadata
from support.host import key
from support.run_case import RUN_CASE, case_arguments
from support.waiting import PATIENT

MIB = 1024**2
PAYLOAD_BYTES = 48 * MIB


def noise(size):
    return random.Random(size).randbytes(size)


PAYLOADS = {
    "does not shrink": lambda: noise(PAYLOAD_BYTES),
    "shrinks to a sixteenth": lambda: noise(3 * MIB) * 16,
}


def publish(stash, number, payload):
    metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=len(payload))
    return stash.put(key(number), payload, metadata)


@pytest.fixture(scope="module")
def published(server, tmp_path_factory):
    """Settings of a reader, and the SHA-256 of each large artifact by its key."""
    settings = {"url": server.url, "namespace": "large"}
    cache_dir = tmp_path_factory.mktemp("publisher") / "tier"
    digests = {}
    with Stash(ClientConfig.load({}, cache_dir=cache_dir, **settings, **PATIENT)) as publisher:
        publish(publisher, 0, b"small")
        for number, make in enumerate(PAYLOADS.values(), 1):
            payload = make()
            publish(publisher, number, payload)
            digests[number] = hashlib.sha256(payload).hexdigest()
    return settings, digests


@pytest.mark.parametrize(
    ("call", "name", "most"),
    [
        pytest.param(*("get", "does not shrink", 1.1 * PAYLOAD_BYTES), marks=pytest.mark.extended),
        ("fetch", "shrinks to a sixteenth", 24 * MIB),
    ],
)
def test_large_artifact_takes_little_extra_memory(published, tmp_path, call, name, most):
    settings, digests = published
    number = list(PAYLOADS).index(name) + 1
    case = case_arguments(
        "fetching:growth",
        settings=settings | {"cache_dir": tmp_path / "reader"},
        small=key(0),
        large=key(number),
        is_file=call == "fetch",
    )
    for source in ("the server", "this host's disk"):
        report = tmp_path / "report.json"
        subprocess.run([sys.executable, RUN_CASE, report, *case], check=True)
        measured = json.loads(report.read_text())
        assert measured["sha256"] == digests[number], source
        assert measured["grown_bytes"] < most, source
