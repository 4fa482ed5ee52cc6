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
_LEAD_BYTES: Final = 4 + len(_MAGIC)


def append_provenance(envelope: IO[bytes], proof: "Provenance | None") -> None:
    """Append the provenance to an envelope, and flush the file's buffer to the kernel."""
    text = b"{}" if proof is None else proof.model_dump_json(exclude_defaults=True).encode()
    if text != b"{}":
        envelope.seek(0, os.SEEK_END)
        envelope.write(text + struct.pack(">I", len(text)) + _MAGIC)
    envelope.flush()


def read_provenance(file: IO[bytes]) -> "tuple[Provenance, int]":
    """Return the provenance behind an envelope, and the envelope's size. The file is at its start,
    and stays there. A missing or malformed provenance counts as empty.
    """
    from pydantic import ValidationError

    from graphstash._trust.proof import Provenance

    end = os.fstat(file.fileno()).st_size
    tail = os.pread(file.fileno(), _MAX_BYTES + _LEAD_BYTES, max(0, end - _MAX_BYTES - _LEAD_BYTES))
    text, lead = tail[:-_LEAD_BYTES], tail[-_LEAD_BYTES:]
    if len(lead) < _LEAD_BYTES or not lead.endswith(_MAGIC):
        return Provenance(), end
    (length,) = struct.unpack(">I", lead[:4])
    if length > len(text):
        return Provenance(), end
    try:
        proof = Provenance.model_validate_json(text[len(text) - length :])
    except ValidationError:
        return Provenance(), end
    return proof, end - _LEAD_BYTES - length
