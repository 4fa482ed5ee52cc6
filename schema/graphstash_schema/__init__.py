"""The words that the graphstash client and server both speak: pydantic and stdlib only."""

from graphstash_schema.artifact import (
    MAX_COMPILE_SECONDS,
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    LookupRequest,
    LookupResponse,
    VerifyResponse,
)
from graphstash_schema.device import DeviceType
from graphstash_schema.digest import Digest, DigestHasher
from graphstash_schema.errors import RETRYABLE, STATUS, ErrorCode, InvalidValueError, Problem
from graphstash_schema.fingerprint import (
    MAX_PARTS,
    ArtifactKind,
    Fingerprint,
    fingerprint_of,
    parts_for_display,
)
from graphstash_schema.lease import LeaseOutcome, LeaseReply, LeaseRequest, LeaseState
from graphstash_schema.manifest import Manifest, ManifestEntry, ManifestUpdate
from graphstash_schema.names import ManifestName, Namespace, Word
from graphstash_schema.stats import NamespaceStats, ServerStats

__all__ = [
    "MAX_COMPILE_SECONDS",
    "MAX_PARTS",
    "RETRYABLE",
    "STATUS",
    "ArtifactInfo",
    "ArtifactKey",
    "ArtifactKind",
    "ArtifactMetadata",
    "DeviceType",
    "Digest",
    "DigestHasher",
    "ErrorCode",
    "Fingerprint",
    "InvalidValueError",
    "LeaseOutcome",
    "LeaseReply",
    "LeaseRequest",
    "LeaseState",
    "LookupRequest",
    "LookupResponse",
    "Manifest",
    "ManifestEntry",
    "ManifestName",
    "ManifestUpdate",
    "Namespace",
    "NamespaceStats",
    "Problem",
    "ServerStats",
    "VerifyResponse",
    "Word",
    "fingerprint_of",
    "parts_for_display",
]
