"""Measure the client's CPU time of small artifacts, beside doing the same by hand.

By hand: `http.client` on one kept connection, one SHA-256, and zstd. A copy on this host's disk is
opened, read, hashed and decompressed. The client also locks, keeps the artifact on the disk, and
checks key, digest, standing and metadata. All ways take turns in one process, each with artifacts
of its own, and a round is the mean of many calls. System time includes the creation of files, which
depends on the file system.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.small --rounds 9
"""

import base64
import hashlib
import http.client
import json
import secrets
import time
from itertools import count

import zstandard

from benchmarks.figures import part, rotated
from benchmarks.verify import publish
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey, ArtifactMetadata

SIZES = {"4 KiB": (4096, 40), "1 MiB": (1024**2, 5)}
"""Bytes of an artifact, and calls per round."""

GET, LOCAL, PUT = "get", "get, from this host's disk", "put"
HANDS = {kind: f"{kind}, by hand" for kind in (GET, LOCAL, PUT)}
NAMESPACE = "default"


def main():
    with part("small", __doc__, rounds=9) as bench:
        for size_label, (size_bytes, calls) in SIZES.items():
            keys = [key_of(size_label, n) for n in range((bench.settings.rounds + 1) * calls)]
            publish(
                bench.server, bench.directory, {k: secrets.token_bytes(size_bytes) for k in keys}
            )
            tier = bench.directory / f"tier {size_label}"
            config = ClientConfig.load({}, url=bench.server.url, cache_dir=tier)
            with Stash(config, run="run-small") as stash:
                ways = ways_of(stash, bench.server.url, size_bytes)
                for number in bench.rounds(first=-1):  # the first round imports modules
                    part_of_keys = keys[(number + 1) * calls :][:calls]
                    order = [GET, *rotated([way for way in ways if way != GET], number)]
                    costs = {way: cost(ways[way], part_of_keys) for way in order}
                    if number >= 0:
                        report(bench.figures, size_label, costs)


def key_of(*parts):
    fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()
    return ArtifactKey.parse("jax", "cpu-x86_64", fingerprint)


def ways_of(stash, url, size_bytes):
    """Return functions of a key. The local ones need a copy, which `get` leaves behind."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    compressor = zstandard.ZstdCompressor(level=3)
    metadata = ArtifactMetadata(compile_seconds=60.0, raw_size_bytes=size_bytes)
    payload, number = secrets.token_bytes(size_bytes), count()

    def get_by_hand(key):
        connection.request("GET", key.artifact_path(NAMESPACE))
        unpack(connection.getresponse().read())

    def local_by_hand(key):
        with stash.local.path(NAMESPACE, key, origin=stash.standing.origin).open("rb") as file:
            unpack(file.read())

    def put(_):
        stash.put(key_of("put", size_bytes, next(number)), payload, metadata)

    def put_by_hand(_):
        key = key_of("by hand", size_bytes, next(number))
        header = {name: getattr(key, name) for name in ("kind", "device_type", "fingerprint")}
        header |= {"raw_size": size_bytes, "raw_sha256": hashlib.sha256(payload).hexdigest()}
        text = json.dumps(header | {"compile_seconds": 0}).encode()
        lead = b"GSTASH\x01\n" + len(text).to_bytes(4)
        blob = lead + text + compressor.compress(payload)
        digest = base64.b64encode(hashlib.sha256(blob).digest()).decode()
        headers = {
            "Content-Type": "application/octet-stream",
            "Repr-Digest": f"sha-256=:{digest}:",
            "Graphstash-Metadata": metadata.to_header(),
        }
        connection.request("PUT", key.artifact_path(NAMESPACE), blob, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 201

    return {
        GET: stash.get,
        LOCAL: stash.get,
        PUT: put,
        HANDS[GET]: get_by_hand,
        HANDS[LOCAL]: local_by_hand,
        HANDS[PUT]: put_by_hand,
    }


def unpack(blob):
    """Hash a blob and decompress its payload. In the local tier, provenance follows the blob."""
    hashlib.sha256(blob).digest()
    start = 12 + int.from_bytes(blob[8:12])
    zstandard.ZstdDecompressor().decompressobj().decompress(memoryview(blob)[start:])


def cost(act, keys):
    """Return the mean CPU seconds of the process per call."""
    began = time.process_time()
    for key in keys:
        act(key)
    return (time.process_time() - began) / len(keys)


def report(figures, size_label, costs):
    for way, hand in HANDS.items():
        figures.add(size_label, way, "client, µs", 1e6 * costs[way])
        figures.add(size_label, way, "by hand, µs", 1e6 * costs[hand])
        figures.add(size_label, way, "ratio", costs[way] / costs[hand])


if __name__ == "__main__":
    main()
