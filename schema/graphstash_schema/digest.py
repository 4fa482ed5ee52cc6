"""Digest: the SHA-256 and the size of a blob.

The SHA-256 is spelled `sha256:<64 hex>` in JSON and ETags, `sha-256=:<base64>:` in `Repr-Digest`
(RFC 9530), and bare hex in file names and object keys.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Self

from graphstash_schema.errors import ErrorCode, InvalidValueError

__all__ = ["Digest", "DigestHasher"]

_HEX = re.compile(r"[0-9a-f]{64}")
_REPR_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?=,|$)")


@dataclass(frozen=True, slots=True)
class Digest:
    """Identifies a blob: equal digests mean equal bytes.

    Raises:
        InvalidValueError: `sha256` is not 64 lower-case hex digits, or the size is negative.
    """

    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        if _HEX.fullmatch(self.sha256) is None:
            raise InvalidValueError(
                code=ErrorCode.INVALID_DIGEST,
                what="digest",
                value=self.sha256,
                expected="64 lower-case hex digits",
            )
        if self.size_bytes < 0:
            raise InvalidValueError(
                code=ErrorCode.INVALID_DIGEST,
                what="size",
                value=self.size_bytes,
                expected="0 bytes or more",
            )

    def __str__(self) -> str:
        return f"sha256:{self.sha256}"

    @property
    def etag(self) -> str:
        """The strong entity tag (RFC 9110), with quotes."""
        return f'"sha256:{self.sha256}"'

    @property
    def repr_digest(self) -> str:
        """The `Repr-Digest` field value (RFC 9530)."""
        return f"sha-256=:{base64.b64encode(bytes.fromhex(self.sha256)).decode()}:"

    @classmethod
    def parse(cls, text: str, *, size_bytes: int) -> Self:
        """Parse `sha256:<hex>`, or raise InvalidValueError."""
        prefix, _, hexadecimal = text.partition(":")
        if prefix != "sha256":
            raise InvalidValueError(
                code=ErrorCode.INVALID_DIGEST,
                what="digest",
                value=text,
                expected="sha256:<64 lower-case hex digits>",
            )
        return cls(hexadecimal, size_bytes)

    @classmethod
    def parse_repr_digest(cls, text: str, *, size_bytes: int) -> Self:
        """Parse the SHA-256 of a `Repr-Digest` field, or raise InvalidValueError."""
        match = _REPR_DIGEST.search(text)
        try:
            raw = base64.b64decode(match.group(1), validate=True) if match else b""
        except binascii.Error:
            raw = b""
        # The last base64 character has spare bits. Reject spellings in which they are not 0.
        is_canonical = match is not None and base64.b64encode(raw).decode() == match.group(1)
        if len(raw) != hashlib.sha256().digest_size or not is_canonical:
            raise InvalidValueError(
                code=ErrorCode.INVALID_DIGEST,
                what="Repr-Digest",
                value=text,
                expected="sha-256=:<base64 of 32 bytes>: (RFC 9530)",
            )
        return cls(raw.hex(), size_bytes)

    @classmethod
    def of(cls, blob: bytes) -> Self:
        """Return the digest of bytes in memory."""
        return cls(hashlib.sha256(blob).hexdigest(), len(blob))


class DigestHasher:
    """Computes the digest of a stream of bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._size_bytes = 0

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._hash.update(chunk)
        self._size_bytes += memoryview(chunk).nbytes

    @property
    def size_bytes(self) -> int:
        """Number of bytes added so far."""
        return self._size_bytes

    def digest(self) -> Digest:
        """Return the digest of all bytes added so far."""
        return Digest(self._hash.hexdigest(), self._size_bytes)
