"""Bytes that changed on the way, with headers that say they did not."""

import dataclasses
import hashlib
import struct

import pytest
import zstandard

from graphstash_schema import Digest
from support.reader_job import OWN

PAYLOAD = bytes(hashlib.sha256(str(n).encode()).digest()[0] for n in range(20_000))


def flipped_in_the_payload(blob):
    middle = len(blob) - 1000
    return blob[:middle] + bytes([blob[middle] ^ 0x10]) + blob[middle + 1 :]


def with_another_payload(blob):
    head = blob[: 12 + struct.unpack(">I", blob[8:12])[0]]
    return head + zstandard.ZstdCompressor().compress(b"x" * len(PAYLOAD))


def with_raw_size(text):
    return lambda blob: blob.replace(b'"raw_size": 20000', b'"raw_size": ' + text)


_DAMAGES = {
    "cut": lambda blob: blob[:-7],
    "cut in the header": lambda blob: blob[:100],
    "empty": lambda _: b"",
    "flipped in the payload": flipped_in_the_payload,
    "flipped in the magic": lambda blob: b"H" + blob[1:],
    "another raw size": with_raw_size(b"19999"),
    "a raw size of text": with_raw_size(b'"2e4"'),
    "a raw size below zero": with_raw_size(b"-2000"),
    "a header of 4 gigabytes": lambda blob: blob[:8] + struct.pack(">I", 2**32 - 1) + blob[12:],
    "another payload": with_another_payload,
}
_TAILS = {
    "zeros": lambda blob: blob + b"\0" * 100,
    "a second frame": lambda blob: blob + zstandard.ZstdCompressor().compress(b"more"),
    "a skippable frame": lambda blob: blob + b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"code",
}
_UNREADABLE = {
    *("cut in the header", "empty", "flipped in the magic"),
    *("a raw size of text", "a header of 4 gigabytes"),
}
"""Whose header does not say how large the payload is, which is part of what is signed."""


def damaging(damage):
    """A server that damages artifacts; whatever its headers say is true of what it sends."""

    def change(request, answer):
        if request.method != "GET" or answer.status != 200:
            return answer
        body = damage(answer.body)
        assert body != answer.body
        headers = answer.headers | {"repr-digest": Digest.of(body).repr_digest}
        return dataclasses.replace(answer, body=body, headers=headers)

    return change


@pytest.fixture
def reader(fort, space):
    """Settings of jobs that share a token: making one changes the server."""
    return {"token": fort.token(f"read:{space}"), "read_only": True}


def reason_of(job, key):
    """Why a job compiles by itself."""
    assert job.build(key) == OWN
    assert (job.compiles, job.stats.hits) == (1, 0)
    (reason,) = job.fallbacks
    assert job.fallbacks == {reason: 1}
    return reason


def test_an_artifact_is_damaged_by_the_server(fort, key, publish, middlebox, victim, reader, team):
    """No decompressor sees a signed one, whatever it is."""
    damages = _DAMAGES | _TAILS
    for number in range(len(damages)):
        publish(key(number), PAYLOAD, signing_key=team.trust("ci"))
        publish(key(100 + number), PAYLOAD)
    box = middlebox()
    with fort.withstands() as refused:
        for number, (name, damage) in enumerate(damages.items()):
            box.change = damaging(damage)
            reason = "corrupt" if name in _UNREADABLE else "bad_signature"
            job = victim(url=box.url, trusted_keys=team.file, **reader)
            assert reason_of(job, key(number)) == reason, name
            if name in _DAMAGES:
                assert reason_of(victim(url=box.url, **reader), key(100 + number)) == "corrupt", (
                    name
                )
    assert refused == {}


def test_something_is_hidden_behind_an_unsigned_artifact(
    fort, key, publish, middlebox, victim, reader
):
    """Nobody vouches for it either way: the compiler gets the payload that the header names."""
    publish(key(), PAYLOAD)
    box = middlebox()
    with fort.withstands() as refused:
        for name, tail in _TAILS.items():
            box.change = damaging(tail)
            assert victim(url=box.url, **reader).build(key()) in {PAYLOAD, OWN}, name
    assert refused == {}


_LIES = (
    ({"content-length": "99999"}, "truncated"),
    ({"content-length": "7"}, "digest_mismatch"),
    ({"repr-digest": Digest.of(b"other").repr_digest}, "digest_mismatch"),
    ({"repr-digest": "sha-256=:AAAA:"}, "protocol"),
    ({"repr-digest": "md5=:AAAA:"}, "protocol"),
    ({"graphstash-metadata": "%%%"}, "protocol"),
    ({"graphstash-protocol": "2"}, "protocol"),
    ({"content-encoding": "gzip"}, None),
    ({"content-range": "bytes 0-1/99999"}, None),
)


def test_the_headers_of_an_artifact_lie(fort, key, publish, middlebox, victim, reader):
    """Only those that say something of the bytes are believed, and these are checked."""
    publish(key(), PAYLOAD)
    box = middlebox()
    with fort.withstands() as refused:
        for headers, reason in _LIES:

            def lying(request, answer, headers=headers):
                if request.method == "GET" and answer.status == 200:
                    answer.headers |= headers
                return answer

            box.change = lying
            job = victim(url=box.url, **reader)
            if reason is not None:
                assert reason_of(job, key()) == reason, headers
            else:
                assert (job.build(key()), job.compiles) == (PAYLOAD, 0), headers
    assert refused == {}
