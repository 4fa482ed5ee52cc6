"""Proof: what lies behind an envelope on this host's disk and says why it may be used.

    the envelope, as it came
    JSON       `Proof`: the publisher's signature, or a code that only this user can make
    4 bytes    length of the JSON, big-endian, at most 4 KiB
    8 bytes    magic "GSPROOF" 0x0a

In one file, so that both appear, are used and go together. What this host has compiled without a
signing key is told by an HMAC over the same statement that would have been signed; its secret stays
on this host (`LocalTier.secret`).
"""

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphstash_schema import (
    ArtifactKey,
    ArtifactSignature,
    Digest,
    DigestHasher,
    Namespace,
    SigningKeyId,
    statement_of,
)

__all__ = ["Part", "Proof", "Subject", "append_proof", "digest_of", "is_ours", "read_proof"]

_MAGIC: Final = b"GSPROOF\n"
_MAX_BYTES: Final = 4096
_CHUNK_BYTES: Final = 1024**2
_NO_KEY: Final = SigningKeyId("0" * 32)


@dataclass(frozen=True, slots=True)
class Subject:
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


class Proof(BaseModel):
    """Why an envelope may be used; empty when nobody said so."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    signature: ArtifactSignature | None = None
    code: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep."""
        return self.signature is None and self.code is None


class Part:
    """The first bytes of a file, as if it ended there."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        self._file = file
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; fewer only at the end."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def append_proof(envelope: Path, proof: Proof) -> None:
    """Writes a proof behind an envelope.

    Raises:
        OSError: the disk refuses.
    """
    if proof.is_empty:
        return
    text = proof.model_dump_json(exclude_none=True).encode()
    with envelope.open("ab") as file:
        file.write(text + struct.pack(">I", len(text)) + _MAGIC)


def read_proof(file: IO[bytes]) -> tuple[Proof, int]:
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
            return Proof(), end
        (length,) = struct.unpack(">I", tail[:4])
        start = end - lead - length
        if length > _MAX_BYTES or start < 0:
            return Proof(), end
        file.seek(start)
        return Proof.model_validate_json(file.read(length)), start
    except ValidationError:
        return Proof(), end
    finally:
        file.seek(0)


def is_ours(file: IO[bytes]) -> bool:
    """Whether nobody else can change the file while it is checked: it is this user's, or root's."""
    status = os.fstat(file.fileno())
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def digest_of(file: IO[bytes], size_bytes: int) -> Digest:
    """The digest of a file's first bytes; the file is at its beginning afterwards.

    Raises:
        OSError: it cannot be read.
    """
    hasher = DigestHasher()
    part = Part(file, size_bytes)
    while chunk := part.read(_CHUNK_BYTES):
        hasher.update(chunk)
    file.seek(0)
    return hasher.digest()
