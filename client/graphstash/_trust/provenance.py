"""Proof: what lies behind an envelope on this host's disk and says why it may be used.

    the envelope, as it came
    JSON       `Provenance`: the publisher's signature, or a code that only this user can make
    4 bytes    length of the JSON, big-endian, at most 4 KiB
    8 bytes    magic "GSPROOF" 0x0a

In one file, so that both appear, are used and go together. What this host has compiled without a
signing key is told by an HMAC over the same statement that would have been signed; its secret stays
on this host (`LocalTier.secret`).
"""

import hashlib
import hmac
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphstash_schema import (
    MAX_COMPILE_SECONDS,
    ArtifactKey,
    ArtifactSignature,
    Digest,
    DigestHasher,
    Namespace,
    SigningKeyId,
    statement_of,
)

__all__ = [
    "BoundedReader",
    "Provenance",
    "SignedSubject",
    "append_provenance",
    "digest_of",
    "open_ours",
    "read_provenance",
]

_MAGIC: Final = b"GSPROOF\n"
_MAX_BYTES: Final = 4096
_CHUNK_BYTES: Final = 1024**2
_NO_KEY: Final = SigningKeyId("0" * 32)


@dataclass(frozen=True, slots=True)
class SignedSubject:
    """What is signed: these bytes, under this key, in this namespace."""

    namespace: Namespace
    key: ArtifactKey
    digest: Digest
    raw_size_bytes: int

    def statement(self, key_id: SigningKeyId) -> bytes:
        """The bytes that a key signs."""
        return statement_of(
            namespace=self.namespace,
            key=self.key,
            digest=self.digest,
            raw_size_bytes=self.raw_size_bytes,
            key_id=key_id,
        )

    def code(self, secret: bytes) -> str:
        """What only a user who knows the secret can say of it, 64 hex digits."""
        return hmac.new(secret, self.statement(_NO_KEY), hashlib.sha256).hexdigest()


class Provenance(BaseModel):
    """Why an envelope may be used, and what it saves; empty when nobody said so.

    Attributes:
        signature: its publisher's.
        code: this user's, of what this host has compiled.
        compile_seconds: what its compilation took, as its publisher said.
        sha256: of the envelope, as it came or was made.
        stored_at: when it was last known to be what its server has, in seconds since 1970.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    signature: ArtifactSignature | None = None
    code: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    compile_seconds: float = Field(default=0.0, ge=0, le=MAX_COMPILE_SECONDS)
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    stored_at: float = Field(default=0.0, ge=0)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep."""
        return self == Provenance()


class BoundedReader:
    """The first bytes of a file, as if it ended there."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        self._file = file
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def append_provenance(envelope: IO[bytes], proof: Provenance) -> None:
    """Writes a proof behind an envelope, and everything to the disk's cache.

    Raises:
        OSError: the disk refuses.
    """
    if not proof.is_empty:
        text = proof.model_dump_json(exclude_defaults=True).encode()
        envelope.seek(0, os.SEEK_END)
        envelope.write(text + struct.pack(">I", len(text)) + _MAGIC)
    envelope.flush()


def read_provenance(file: IO[bytes]) -> tuple[Provenance, int]:
    """The proof behind an envelope, an empty one when there is none, and the envelope's size.

    The file is at its beginning afterwards.

    Raises:
        OSError: it cannot be read.
    """
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


def open_ours(path: Path) -> IO[bytes]:
    """Opens a file that nobody else can change while it is checked; never waits.

    Raises:
        OSError: it is absent, a symbolic link, a pipe or a device, not this user's or root's, or
            others may write to it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags), "rb")
    status = os.fstat(file.fileno())
    is_private = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
    if stat.S_ISREG(status.st_mode) and is_private:
        return file
    file.close()
    raise PermissionError(f"{path} is no regular file that only this user can change")


def digest_of(file: IO[bytes], size_bytes: int) -> Digest:
    """The digest of a file's first bytes; the file is at its beginning afterwards.

    Raises:
        OSError: it cannot be read.
    """
    hasher = DigestHasher()
    part = BoundedReader(file, size_bytes)
    while chunk := part.read(_CHUNK_BYTES):
        hasher.update(chunk)
    file.seek(0)
    return hasher.digest()
