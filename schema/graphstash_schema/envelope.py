"""The head of an envelope: what every blob begins with, and whose artifact it says it is.

    8 bytes   magic "GSTASH" 0x01 0x0a
    4 bytes   length of the header, big-endian, at most 4 KiB
    header    JSON: kind, device_type, fingerprint, raw_size, raw_sha256, compile_seconds

The payload follows; only the client reads it.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from graphstash_schema.key import ArtifactKey

__all__ = ["ENVELOPE_MAGIC", "MAX_ENVELOPE_HEAD_BYTES", "names_key", "read_envelope_head"]

ENVELOPE_MAGIC: Final = b"GSTASH\x01\n"

_MAX_HEADER_BYTES: Final = 4096
_LEAD_BYTES: Final = len(ENVELOPE_MAGIC) + 4

MAX_ENVELOPE_HEAD_BYTES: Final = _LEAD_BYTES + _MAX_HEADER_BYTES
"""Longest head: what of a blob has to be read to know it."""


def read_envelope_head(read: Callable[[int], bytes]) -> dict[str, Any]:
    """The header of the envelope that `read` returns, which then stands at the payload.

    Raises:
        ValueError: when it is not an envelope; says why.
    """
    lead = read(_LEAD_BYTES)
    if not lead.startswith(ENVELOPE_MAGIC) or len(lead) < _LEAD_BYTES:
        raise ValueError("not a graphstash envelope")
    (length,) = struct.unpack(">I", lead[len(ENVELOPE_MAGIC) :])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"envelope header of {length} bytes; at most {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(read(length))
    except (ValueError, RecursionError):  # also covers text that is not UTF-8
        raise ValueError("envelope header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("envelope header is not an object")  # noqa: TRY004 - one error for all
    return header


def names_key(header: Mapping[str, Any], key: ArtifactKey) -> bool:
    """Whether a header says that its payload is the artifact of a key."""
    named = [header.get(part) for part in ("kind", "device_type", "fingerprint")]
    return named == [key.kind, key.device_type, key.fingerprint]
