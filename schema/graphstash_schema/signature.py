"""Signatures: what a publisher signs, so that a reader need not trust the server or the network.

The statement is canonical: a domain, then length-prefixed fields in a fixed order. Two different
artifacts therefore never have the same statement. Publishers sign it with Ed25519 (RFC 8032). A
reader builds the statement from the requested key and the received bytes, never from the
accompanying metadata.
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
    """Identifier of a public key: the first 32 hex digits of its SHA-256."""

    __slots__ = ()
    form = re.compile(r"[0-9a-f]{32}")
    what = "signing key id"
    code = ErrorCode.INVALID_METADATA


class ArtifactSignature(WireModel):
    """A signature in an artifact's metadata."""

    key_id: SigningKeyId
    value: str = Field(
        pattern=r"^[A-Za-z0-9_-]{86}$", description="64 bytes, base64url without padding"
    )


def key_id_of(public_key: bytes) -> SigningKeyId:
    """Return the identifier of a raw Ed25519 public key (32 bytes)."""
    return SigningKeyId(hashlib.sha256(public_key).hexdigest()[:32])


def statement_of(
    *,
    namespace: Namespace,
    key: ArtifactKey,
    digest: Digest,
    raw_size_bytes: int,
    key_id: SigningKeyId,
) -> bytes:
    """Return the bytes to sign.

    Args:
        namespace: namespace of the artifact. The signature is invalid in any other namespace.
        key: key of the artifact.
        digest: digest of the blob. A reader checks the signature before it decompresses the blob.
        raw_size_bytes: size of the payload, which bounds decompression.
        key_id: identifier of the signing key.
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
