"""Constants of the wire protocol.

A change that an older client or server would misread needs a new `PROTOCOL_VERSION` and another
golden file (tests/unit).
"""

from typing import Final

__all__ = [
    "ADMIN_PREFIX",
    "API_PREFIX",
    "DEFAULT_LEASE_SECONDS",
    "DEFAULT_MAX_ARTIFACT_BYTES",
    "HEADER_ACCEPT_REDIRECT",
    "HEADER_COPY",
    "HEADER_HITS",
    "HEADER_JOB",
    "HEADER_LEASE",
    "HEADER_METADATA",
    "HEADER_PROTOCOL",
    "HEADER_PUBLISHER",
    "HEADER_REQUEST_ID",
    "HEADER_WITHDRAWALS",
    "HEADER_WRITERS",
    "LOOKUP_PIN_SECONDS",
    "MAX_DESCRIBE_BYTES",
    "MAX_DESCRIPTIONS",
    "MAX_LEASE_SECONDS",
    "MAX_LOOKUP_KEYS",
    "MAX_MANIFEST_ENTRIES",
    "MAX_METADATA_BYTES",
    "MAX_WAIT_SECONDS",
    "MIN_LEASE_SECONDS",
    "PROBLEM_MEDIA_TYPE",
    "PROTOCOL_VERSION",
]

PROTOCOL_VERSION: Final = 1
"""Version that a client sends in `HEADER_PROTOCOL`. A server refuses versions that it does not
support."""

API_PREFIX: Final = "/v1"
"""Path prefix of calls in a namespace: `/v1/{namespace}/...`."""

ADMIN_PREFIX: Final = "/v1/-"
"""Path prefix of calls outside namespaces. `-` is not a valid namespace."""

HEADER_PROTOCOL: Final = "Graphstash-Protocol"
"""Request and response: the protocol version, a decimal integer. Default of a request: 1."""

HEADER_METADATA: Final = "Graphstash-Metadata"
"""PUT request and GET/HEAD response: base64url (no padding) of `ArtifactMetadata` as JSON."""

HEADER_JOB: Final = "Graphstash-Job"
"""Request: name of the caller's job, under which the history counts the request. A server ignores
a malformed name."""

HEADER_LEASE: Final = "Graphstash-Lease"
"""PUT and DELETE of a lease: the token that the grant returned."""

HEADER_PUBLISHER: Final = "Graphstash-Publisher"
"""PUT of an artifact by a region: `region.Publisher` as JSON."""

HEADER_WITHDRAWALS: Final = "Graphstash-Withdrawals"
"""PUT of an artifact by a region, or by a job that compiled it without the server: the position in
the namespace's list of withdrawals that the caller has applied. The server answers 412 if it
withdrew the same bytes, or more than 10,000 artifacts, after that position."""

HEADER_HITS: Final = "Graphstash-Hits"
"""HEAD response: how often the artifact was served, as of the last flush of counters."""

HEADER_ACCEPT_REDIRECT: Final = "Graphstash-Accept-Redirect"
"""GET request: `1` if the server may redirect (307) the client to the blob in S3."""

HEADER_COPY: Final = "Graphstash-Copy"
"""GET request: `1` if the client only copies the artifact. The server then counts neither a hit
nor a miss."""

HEADER_WRITERS: Final = "Graphstash-Writers"
"""GET request of a manifest: `1` if the client accepts the field `writer`, a number, in entries.
Otherwise the server omits the field."""

HEADER_REQUEST_ID: Final = "X-Request-Id"
"""Response: the request's ID in the server's log, also in a problem document's `instance`."""

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
"""Media type of every error body (RFC 9457)."""

DEFAULT_MAX_ARTIFACT_BYTES: Final = 4 * 1024**3
"""Default limit of a server. TPU executables reach hundreds of MB."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Maximum size of an encoded `HEADER_METADATA` value. Servers and proxies limit all headers
together, usually to 64 KiB, nginx by default to 4 buffers of 8 KiB."""

MAX_DESCRIPTIONS: Final = 32
"""Maximum descriptions in one `artifacts:describe`."""

MAX_DESCRIBE_BYTES: Final = 1024**2
"""Maximum body of `artifacts:describe`."""

MAX_LOOKUP_KEYS: Final = 1000
"""Maximum keys in one look-up. A bulk query of about 2,000 made Cachix answer 502 (cachix#322)."""

MAX_MANIFEST_ENTRIES: Final = 4096
"""Maximum artifacts in a manifest. If more were used, each writer keeps an equal share: its most
recently used entries."""

LOOKUP_PIN_SECONDS: Final = 600
"""Seconds for which a look-up protects a found artifact from eviction, so that the next GET finds
it. An upload that needs the space can still evict it."""

MIN_LEASE_SECONDS: Final = 1.0

DEFAULT_LEASE_SECONDS: Final = 30.0
"""Default duration of a lease. If the holder is killed, other jobs may wait that long. A live
holder renews the lease after each third of the duration."""

MAX_LEASE_SECONDS: Final = 600.0

MAX_WAIT_SECONDS: Final = 60.0
"""Maximum `Prefer: wait=` of one call. A server shortens longer waits."""
