"""ArtifactMetadata: a publisher's statements about an artifact, sent in a header."""

import base64
import binascii
from typing import Final, Self

from pydantic import Field, ValidationError

from graphstash_schema.errors import ErrorCode, InvalidValueError
from graphstash_schema.key import MAX_PARTS
from graphstash_schema.model import WireModel
from graphstash_schema.names import LINE
from graphstash_schema.protocol import MAX_METADATA_BYTES
from graphstash_schema.signature import ArtifactSignature

__all__ = ["MAX_COMPILE_SECONDS", "ArtifactMetadata"]

MAX_COMPILE_SECONDS: Final = 7 * 24 * 3600.0
"""One week. A larger value, which no compilation takes, would distort the eviction order."""


class ArtifactMetadata(WireModel):
    """A publisher's statements about an artifact."""

    version: int = Field(default=1, ge=1, le=1, description="version of this record's format")
    compile_seconds: float = Field(
        ge=0, le=MAX_COMPILE_SECONDS, description="wall time of the compilation"
    )
    raw_size_bytes: int = Field(ge=0, description="size of the payload before compression")
    toolchain: str = Field(
        default="",
        max_length=256,
        pattern=LINE,
        description='versions, e.g. "torch 2.7.0, torch_xla 2.7.0"',
    )
    producer: str = Field(
        default="",
        max_length=128,
        pattern=LINE,
        description="who published it, e.g. user@host; shown, never trusted",
    )
    parts: dict[str, str] = Field(
        default_factory=dict,
        max_length=MAX_PARTS,
        description="the fingerprint's parts, shortened: they explain a miss",
    )
    signature: ArtifactSignature | None = Field(
        default=None, description="of the publisher; see signature.py"
    )

    def to_header(self) -> str:
        """Encode the record for `HEADER_METADATA`. Drop the largest parts if it is too large."""
        parts = dict(self.parts)
        while True:
            record = self.model_copy(update={"parts": parts})
            raw = record.model_dump_json(exclude_defaults=True).encode()
            encoded = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
            if len(encoded) <= MAX_METADATA_BYTES or not parts:
                return encoded
            del parts[max(parts, key=lambda name: len(parts[name]))]

    @classmethod
    def from_header(cls, value: str) -> Self:
        """Decode `HEADER_METADATA`, or raise InvalidValueError."""
        if len(value) > MAX_METADATA_BYTES:
            raise _invalid(f"{len(value)} characters", f"at most {MAX_METADATA_BYTES} characters")
        try:
            raw = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
            return cls.model_validate_json(raw)
        except (binascii.Error, ValueError) as error:
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                where = ".".join(str(step) for step in first["loc"]) or "the record"
                raise _invalid(first["input"], f"{where}: {first['msg']}") from None
            raise _invalid(value, "base64url of a JSON object") from None


def _invalid(value: object, expected: str) -> InvalidValueError:
    return InvalidValueError(
        code=ErrorCode.INVALID_METADATA, what="metadata header", value=value, expected=expected
    )
