"""Types that the graphstash client and server share. Dependencies: pydantic and the stdlib.

A name's module is imported when the name is first used. The modules `names`, `digest`, `errors` and
`protocol` do not import pydantic; most other modules do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        ArtifactInfo,
        LookupRequest,
        LookupResponse,
        VerifyResponse,
    )
    from graphstash_schema.audit import AuditAction, AuditEntry, AuditLog
    from graphstash_schema.digest import Digest, DigestHasher
    from graphstash_schema.errors import RETRYABLE, STATUS, ErrorCode, InvalidValueError
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
    from graphstash_schema.metadata import MAX_COMPILE_SECONDS, ArtifactMetadata
    from graphstash_schema.names import ManifestName, Namespace, Word
    from graphstash_schema.policy import NamespaceInfo, NamespaceList, NamespacePolicy, WriteMode
    from graphstash_schema.problem import Problem
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

_NAMES = {
    "access": (
        "Access AccessKind Grant MAX_GRANTS MIN_EXCHANGED_SECONDS NamespacePattern Scope "
        "TOKEN_FORM TokenExchange TokenInfo TokenIssued TokenList TokenRequest"
    ),
    "artifact": "ArtifactInfo LookupRequest LookupResponse VerifyResponse",
    "audit": "AuditAction AuditEntry AuditLog",
    "digest": "Digest DigestHasher",
    "errors": "ErrorCode InvalidValueError RETRYABLE STATUS",
    "key": (
        "ArtifactKey ArtifactKind DeviceType Fingerprint MAX_PARTS fingerprint_of parts_for_display"
    ),
    "lease": "LeaseOutcome LeaseReply LeaseRequest LeaseState",
    "manifest": "Manifest ManifestEntry ManifestUpdate",
    "metadata": "ArtifactMetadata MAX_COMPILE_SECONDS",
    "names": "ManifestName Namespace Word",
    "policy": "NamespaceInfo NamespaceList NamespacePolicy WriteMode",
    "problem": "Problem",
    "quarantine": "ReportReason ReportRequest ReportResponse Withheld WithheldList",
    "signature": "ArtifactSignature SigningKeyId key_id_of statement_of",
    "stats": "NamespaceStats ServerStats",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'graphstash_schema' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"graphstash_schema.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
