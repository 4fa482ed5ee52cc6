"""Zstd frames that decompress to many times their size, in envelopes that declare less."""

import json
import struct
from typing import Any

import pytest
import zstandard

from graphstash_schema import ArtifactKey

GIANT_BYTES = 4 * 1024**3

_BLOCK_BYTES = 128 * 1024
_MAGIC = b"\x28\xb5\x2f\xfd"


def frame(size_bytes: int, *, window_log: int = 17) -> bytes:
    """Return zeros in run-length blocks (RFC 8878 section 3.1.1): 4 bytes for each 128 KiB."""
    head = _MAGIC + b"\0" + bytes([(window_log - 10) << 3])
    block = struct.pack("<I", _BLOCK_BYTES << 3 | 1 << 1)[:3] + b"\0"
    last = struct.pack("<I", _BLOCK_BYTES << 3 | 1 << 1 | 1)[:3] + b"\0"
    return head + block * (size_bytes // _BLOCK_BYTES - 1) + last


def envelope_of(key: ArtifactKey, payload: bytes, **fields: object) -> bytes:
    """Return an envelope with these header fields, true or false."""
    header = {
        "kind": key.kind,
        "device_type": key.device_type,
        "fingerprint": key.fingerprint,
        "raw_size": 10,
        "raw_sha256": "0" * 64,
        "compile_seconds": 1,
    }
    text = json.dumps(header | fields).encode()
    return b"GSTASH\x01\n" + struct.pack(">I", len(text)) + text + payload


def bomb(key: ArtifactKey, **fields: object) -> bytes:
    """Return 131 KB that decompress to 4 GiB."""
    return envelope_of(key, frame(GIANT_BYTES), **fields)


def count_decompressors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each new decompressor."""
    made: list[int] = []
    real = zstandard.ZstdDecompressor

    def counting(*args: Any, **keywords: Any) -> zstandard.ZstdDecompressor:
        made.append(1)
        return real(*args, **keywords)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", counting)
    return made
