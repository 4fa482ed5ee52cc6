"""Provenance: a trailer behind an envelope in the local tier that proves that the job may use it.

    envelope   the bytes as received
    JSON       `Provenance` (in `proof`)
    4 bytes    length of the JSON, big-endian, at most 4 KiB
    8 bytes    magic "GSPROOF" 0x0a

Envelope and proof share one file, so that they appear and disappear together. A job with trusted
keys adds an HMAC to the artifacts that it compiles, so that later jobs of this user may use them
unsigned. The HMAC's secret stays in the local tier (`LocalTier.secret`).
"""

import os
import struct
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance

__all__ = ["append_provenance", "read_provenance"]

_MAGIC: Final = b"GSPROOF\n"
_MAX_BYTES: Final = 4096


def append_provenance(envelope: IO[bytes], proof: "Provenance | None") -> None:
    """Append the provenance to an envelope, and flush the file's buffer to the kernel."""
    text = b"{}" if proof is None else proof.model_dump_json(exclude_defaults=True).encode()
    if text != b"{}":
        envelope.seek(0, os.SEEK_END)
        envelope.write(text + struct.pack(">I", len(text)) + _MAGIC)
    envelope.flush()


def read_provenance(file: IO[bytes]) -> "tuple[Provenance, int]":
    """Return the provenance behind an envelope, and the envelope's size. Rewind the file. A missing
    or malformed provenance counts as empty.
    """
    from pydantic import ValidationError

    from graphstash._trust.proof import Provenance

    end = file.seek(0, os.SEEK_END)
    lead = 4 + len(_MAGIC)
    try:
        file.seek(max(0, end - lead))
        tail = file.read(lead)
        if len(tail) < lead or not tail.endswith(_MAGIC):
            return Provenance(), end
        (length,) = struct.unpack(">I", tail[:4])
        start = end - lead - length
        if length > _MAX_BYTES or start < 0:
            return Provenance(), end
        file.seek(start)
        return Provenance.model_validate_json(file.read(length)), start
    except ValidationError:
        return Provenance(), end
    finally:
        file.seek(0)
