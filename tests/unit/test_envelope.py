import hashlib
import io
import json
import random
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from graphstash._artifacts.envelope import seal, unseal
from graphstash.errors import Reason, VerificationError
from graphstash_schema import ArtifactKey

KEY = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "a" * 64)
OTHER = ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", "b" * 64)
LIMIT = 1024**3


def sealed(tmp_path, payload, *, key=KEY):
    source, target = tmp_path / "payload", io.BytesIO()
    source.write_bytes(payload)
    return seal(key, source, target), target.getvalue()


def opened(blob, *, key=KEY, limit=LIMIT, is_proven=False):
    terms = {"max_bytes": limit, "is_proven": lambda: is_proven}
    into = io.BytesIO()
    header = unseal(io.BytesIO(blob), key, into, **terms)
    at_once = io.BytesIO()
    unseal(io.BytesIO(blob), key, at_once, size_bytes=len(blob), **terms)
    assert at_once.getvalue() == into.getvalue()
    return header, into.getvalue()


@pytest.mark.parametrize("payload", [b"", b"x", b"graph" * 100_000], ids=["empty", "one", "large"])
def test_payload_round_trips_under_its_own_key_within_the_limit(tmp_path, payload):
    envelope, blob = sealed(tmp_path, payload)
    assert envelope.sha256 == hashlib.sha256(blob).hexdigest()
    assert envelope.size_bytes == len(blob)

    header, out = opened(blob)

    assert out == payload
    assert header.raw_size_bytes == len(payload)
    for terms, reason in (
        ({"key": OTHER}, Reason.WRONG_KEY),
        ({"limit": len(payload) - 1}, Reason.TOO_LARGE),
    ):
        with pytest.raises(VerificationError) as caught:
            opened(blob, **terms)
        assert caught.value.reason is reason


@pytest.mark.parametrize("is_proven", [True, False])
def test_truncated_envelope_is_refused(tmp_path, is_proven):
    _, blob = sealed(tmp_path, bytes(range(256)) * 8)
    for length in range(len(blob)):
        with pytest.raises(VerificationError):
            opened(blob[:length], is_proven=is_proven)


@pytest.mark.parametrize("is_proven", [True, False])
def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path, is_proven):
    """A proven blob's SHA-256 is not computed twice, so the frame's checksum detects the flip."""
    payload = bytes(range(256)) * 4
    _, blob = sealed(tmp_path, payload)
    for position in range(len(blob)):
        damaged = bytearray(blob)
        damaged[position] ^= 1
        try:
            _, out = opened(bytes(damaged), is_proven=is_proven)
        except VerificationError:
            continue
        assert out == payload


def forged(payload, **changes):
    header = {
        "kind": KEY.kind,
        "device_type": KEY.device_type,
        "fingerprint": KEY.fingerprint,
        "raw_size": len(payload),
        "raw_sha256": hashlib.sha256(payload).hexdigest(),
        "compile_seconds": 1.0,
    } | changes
    raw = json.dumps({name: value for name, value in header.items() if value is not None}).encode()
    return b"GSTASH\x01\n" + struct.pack(">I", len(raw)) + raw + zstandard.compress(payload)


def test_only_a_proven_frame_with_a_checksum_is_not_hashed():
    """A locally computed digest, such as that of an unsigned file on this host, proves nothing."""
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(b"other")
    whole = forged(b"graph")[: -len(zstandard.compress(b"graph"))] + checked
    for blob, is_proven in ((forged(b"graph", raw_sha256="0" * 64), True), (whole, False)):
        with pytest.raises(VerificationError):
            opened(blob, is_proven=is_proven)


def test_window_is_long_only_if_it_saves_bytes_and_readers_accept_it():
    noise = random.Random(1).randbytes(5 * 1024**2)
    windows = {}
    for name, payload in {
        "repeats itself far away": noise * 2,
        "does not shrink": noise + noise[::-1],
        "shrinks to nothing": bytes(len(noise) * 2),
        "is small": noise[:1000],
    }.items():
        blob = io.BytesIO()
        seal(KEY, payload, blob)
        start = blob.getvalue().index(b"\x28\xb5\x2f\xfd")
        windows[name] = zstandard.get_frame_parameters(blob.getvalue()[start:]).window_size
        assert opened(blob.getvalue())[1] == payload
    assert windows["repeats itself far away"] > 5 * 1024**2
    assert windows["does not shrink"] == 1024**2
    assert windows["is small"] == 1000


def test_a_zip_bomb_stops_at_the_size_that_it_declares():
    bomb = forged(bytes(50_000_000), raw_size=1000)
    into = io.BytesIO()
    with pytest.raises(VerificationError) as caught:
        unseal(io.BytesIO(bomb), KEY, into, max_bytes=LIMIT)
    assert caught.value.reason is Reason.CORRUPT
    assert len(into.getvalue()) <= 1000


@pytest.mark.parametrize(
    "changes",
    [
        {"raw_size": None},
        {"raw_size": -1},
        {"raw_size": "many"},
        {"raw_sha256": "0" * 64},
        {"kind": None},
        {"compile_seconds": "long"},
    ],
)
def test_false_or_incomplete_header_is_refused(changes):
    with pytest.raises(VerificationError):
        opened(forged(b"graph", **changes))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_without_other_error(noise):
    for blob in (noise, b"GSTASH\x01\n" + noise):
        with pytest.raises(VerificationError):
            opened(blob)


def test_payload_that_changes_during_sealing_is_refused(tmp_path, monkeypatch):
    payload = tmp_path / "payload"
    payload.write_bytes(b"a" * 3_000_000)
    compressor = zstandard.ZstdCompressor

    def changing(*args, **kwargs):
        payload.write_bytes(b"b" * 3_000_000)
        return compressor(*args, **kwargs)

    monkeypatch.setattr(zstandard, "ZstdCompressor", changing)
    with pytest.raises(OSError, match="changed while it was read"):
        seal(KEY, payload, io.BytesIO())


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -5.0, 1e300])
def test_compile_time_of_publisher_is_clamped(seconds):
    header, _ = opened(forged(b"graph", compile_seconds=seconds))
    assert 0 <= header.compile_seconds <= 7 * 24 * 3600
