"""Head of an envelope: the start of every blob, which names the blob's artifact.

    8 bytes   magic "GSTASH" 0x01 0x0a
    4 bytes   length of the header, big-endian, at most 4 KiB
    header    JSON: kind, device_type, fingerprint, raw_size, raw_sha256, compile_seconds

The payload follows the head. Only the client unpacks it.
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


def read_envelope_head(read: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the header of an envelope. `read` then continues with the payload.

    Raises:
        ValueError: the bytes are not an envelope.
    """
    lead = read(_LEAD_BYTES)
    if not lead.startswith(ENVELOPE_MAGIC) or len(lead) < _LEAD_BYTES:
        raise ValueError("not a graphstash envelope")
    (length,) = struct.unpack(">I", lead[len(ENVELOPE_MAGIC) :])
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"envelope header of {length} bytes; at most {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(read(length))
    except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
        raise ValueError("envelope header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("envelope header is not an object")  # noqa: TRY004 - one error for all
    return header


def names_key(header: Mapping[str, Any], key: ArtifactKey) -> bool:
    """Return whether the header names this key."""
    named = [header.get(part) for part in ("kind", "device_type", "fingerprint")]
    return named == [key.kind, key.device_type, key.fingerprint]
