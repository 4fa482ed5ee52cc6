"""Signatures: what a publisher signs, so that a reader needs to trust neither server nor network.

The statement is canonical: a domain, then length-prefixed fields in one fixed order, so that no two
artifacts have the same one. It is signed with Ed25519 (RFC 8032). A reader builds it from
the key that it asked for and the bytes that it received, never from the metadata beside them.
"""

import hashlib
import re
import struct
from typing import Final

from pydantic import Field

from graphstash_schema.digest import Digest
from graphstash_schema.errors import ErrorCode
from graphstash_schema.key import ArtifactKey
from graphstash_schema.model import WireModel
from graphstash_schema.names import Namespace, Word

__all__ = ["ArtifactSignature", "SigningKeyId", "key_id_of", "statement_of"]

_DOMAIN: Final = b"graphstash signature v1\n"


class SigningKeyId(Word):
    """Names a public key: the first 32 hex digits of its SHA-256."""

    __slots__ = ()
    form = re.compile(r"[0-9a-f]{32}")
    what = "signing key id"
    code = ErrorCode.INVALID_METADATA


class ArtifactSignature(WireModel):
    """A signature as it travels in the metadata."""

    key_id: SigningKeyId
    value: str = Field(
        pattern=r"^[A-Za-z0-9_-]{86}$", description="64 bytes, base64url without padding"
    )


def key_id_of(public_key: bytes) -> SigningKeyId:
    """The id of a raw Ed25519 public key (32 bytes)."""
    return SigningKeyId(hashlib.sha256(public_key).hexdigest()[:32])


def statement_of(
    *,
    namespace: Namespace,
    key: ArtifactKey,
    digest: Digest,
    raw_size_bytes: int,
    key_id: SigningKeyId,
) -> bytes:
    """What is signed.

    Args:
        namespace: where the artifact is published: in another one the signature is worth nothing.
        key: what the artifact is found by.
        digest: of the blob, that is of the bytes that a decompressor would see first.
        raw_size_bytes: of the payload: bounds the decompression.
        key_id: of the key that signs.
    """
    fields = (
        namespace,
        key.kind.value,
        key.device_type,
        key.fingerprint,
        str(digest),
        str(digest.size_bytes),
        str(raw_size_bytes),
        key_id,
    )
    return _DOMAIN + b"".join(_prefixed(field) for field in fields)


def _prefixed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">Q", len(raw)) + raw
