"""The types that the graphstash client and server share: pydantic and stdlib only."""

from graphstash_schema.access import (
    MAX_GRANTS,
    MIN_EXCHANGED_SECONDS,
    TOKEN_FORM,
    Access,
    AccessKind,
    Grant,
    NamespacePattern,
    Scope,
    TokenExchange,
    TokenInfo,
    TokenIssued,
    TokenList,
    TokenRequest,
)
from graphstash_schema.artifact import (
    MAX_COMPILE_SECONDS,
    ArtifactInfo,
    ArtifactMetadata,
    LookupRequest,
    LookupResponse,
    VerifyResponse,
)
from graphstash_schema.audit import AuditAction, AuditEntry, AuditLog
from graphstash_schema.digest import Digest, DigestHasher
from graphstash_schema.errors import RETRYABLE, STATUS, ErrorCode, InvalidValueError, Problem
from graphstash_schema.key import (
    MAX_PARTS,
    ArtifactKey,
    ArtifactKind,
    DeviceType,
    Fingerprint,
    fingerprint_of,
    parts_for_display,
)
from graphstash_schema.lease import LeaseOutcome, LeaseReply, LeaseRequest, LeaseState
from graphstash_schema.manifest import Manifest, ManifestEntry, ManifestUpdate
from graphstash_schema.names import ManifestName, Namespace, Word
from graphstash_schema.policy import NamespaceInfo, NamespaceList, NamespacePolicy, WriteMode
from graphstash_schema.quarantine import (
    ReportReason,
    ReportRequest,
    ReportResponse,
    Withheld,
    WithheldList,
)
from graphstash_schema.signature import ArtifactSignature, SigningKeyId, key_id_of, statement_of
from graphstash_schema.stats import NamespaceStats, ServerStats

__all__ = [
    "MAX_COMPILE_SECONDS",
    "MAX_GRANTS",
    "MAX_PARTS",
    "MIN_EXCHANGED_SECONDS",
    "RETRYABLE",
    "STATUS",
    "TOKEN_FORM",
    "Access",
    "AccessKind",
    "ArtifactInfo",
    "ArtifactKey",
    "ArtifactKind",
    "ArtifactMetadata",
    "ArtifactSignature",
    "AuditAction",
    "AuditEntry",
    "AuditLog",
    "DeviceType",
    "Digest",
    "DigestHasher",
    "ErrorCode",
    "Fingerprint",
    "Grant",
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
    "NamespaceInfo",
    "NamespaceList",
    "NamespacePattern",
    "NamespacePolicy",
    "NamespaceStats",
    "Problem",
    "ReportReason",
    "ReportRequest",
    "ReportResponse",
    "Scope",
    "ServerStats",
    "SigningKeyId",
    "TokenExchange",
    "TokenInfo",
    "TokenIssued",
    "TokenList",
    "TokenRequest",
    "VerifyResponse",
    "Withheld",
    "WithheldList",
    "Word",
    "WriteMode",
    "fingerprint_of",
    "key_id_of",
    "parts_for_display",
    "statement_of",
]
