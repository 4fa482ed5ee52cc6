"""Provenance: the record behind an envelope in the local tier. `provenance` reads and writes it.

The record has its own module because a job that looks up nothing should not import pydantic.
"""

from pydantic import BaseModel, ConfigDict, Field

from graphstash_schema import MAX_COMPILE_SECONDS, ArtifactSignature

__all__ = ["Provenance"]


class Provenance(BaseModel):
    """Proof that the job may use an envelope, and the compile time that a hit saves.

    Attributes:
        signature: the publisher's signature.
        code: HMAC by the job of this user that compiled the artifact.
        compile_seconds: compile time that the publisher reported.
        sha256: digest of the envelope.
        stored_at: when the envelope last matched the server, in seconds since 1970.
        is_imported: whether it came from a bundle. The server may have withdrawn it earlier.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    signature: ArtifactSignature | None = None
    code: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    compile_seconds: float = Field(default=0.0, ge=0, le=MAX_COMPILE_SECONDS)
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    stored_at: float = Field(default=0.0, ge=0)
    is_imported: bool = False
