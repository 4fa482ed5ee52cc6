"""Provenance: a trailer behind an envelope in the local tier that proves that the job may use it.

    envelope   the bytes as received
    JSON       `Provenance` (in `proof`)
    4 bytes    length of the JSON, big-endian, at most 4 KiB
    8 bytes    magic "GSPROOF" 0x0a

Envelope and proof share one file, so that they appear and disappear together. A job with trusted
keys adds an HMAC to the artifacts that it compiles, so that later jobs of this user may use them
unsigned. The HMAC's secret stays in the local tier (`LocalTier.secret`).
"""

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import graphstash_schema as schema
from graphstash._regular_file import open_regular
from graphstash_schema import ArtifactKey, Digest, DigestHasher, Namespace

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance
    from graphstash_schema import SigningKeyId

__all__ = [
    "BoundedReader",
    "SignedSubject",
    "append_provenance",
    "digest_of",
    "open_ours",
    "read_provenance",
]

_MAGIC: Final = b"GSPROOF\n"
_MAX_BYTES: Final = 4096
_CHUNK_BYTES: Final = 1024**2
_NO_KEY: Final = "0" * 32


@dataclass(frozen=True, slots=True)
class SignedSubject:
    """What a signature covers."""

    namespace: Namespace
    key: ArtifactKey
    digest: Digest
    raw_size_bytes: int

    def statement(self, key_id: "SigningKeyId") -> bytes:
        """Return the bytes that are signed."""
        return schema.statement_of(
            namespace=self.namespace,
            key=self.key,
            digest=self.digest,
            raw_size_bytes=self.raw_size_bytes,
            key_id=key_id,
        )

    def code(self, secret: bytes) -> str:
        """Return the HMAC of the statement without a key ID, as 64 hex digits."""
        statement = self.statement(schema.SigningKeyId(_NO_KEY))
        return hmac.new(secret, statement, hashlib.sha256).hexdigest()


class BoundedReader:
    """Reads the leading bytes of a file, as if the file ended there."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        self._file = file
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. Only the last read returns fewer bytes."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


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


def open_ours(path: Path | str, *, directory: int | None = None) -> IO[bytes]:
    """Open a file that no other user can change during the check. Never block.

    Args:
        path: path of the file.
        directory: descriptor of the directory that a relative path starts from.

    Raises:
        OSError: the file is absent, not a regular file, owned by a user other than this one and
            root, or writable by group or others.
    """
    file = open_regular(path, directory=directory, follow_link=False)
    status = os.fstat(file.fileno())
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022:
        return file
    file.close()
    raise PermissionError(f"{path} can be changed by another user")


def digest_of(file: IO[bytes], size_bytes: int) -> Digest:
    """Return the digest of a file's leading bytes, and rewind the file."""
    hasher = DigestHasher()
    part = BoundedReader(file, size_bytes)
    while chunk := part.read(_CHUNK_BYTES):
        hasher.update(chunk)
    file.seek(0)
    return hasher.digest()
