"""Constants of the wire protocol: version, header names, paths and limits.

All constants belong to wire format version 1. If an old client or an old server would misread a
change, the change needs a new `PROTOCOL_VERSION` and another golden file (tests/unit).
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
    "HEADER_REQUEST_ID",
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
"""Version that every client sends in `HEADER_PROTOCOL`. A server refuses unsupported versions."""

API_PREFIX: Final = "/v1"
"""First path segment of every call in a namespace: `/v1/{namespace}/...`."""

ADMIN_PREFIX: Final = "/v1/-"
"""Path prefix of calls outside namespaces. No namespace has this name."""

HEADER_PROTOCOL: Final = "Graphstash-Protocol"
"""Request and response: the wire version, a decimal integer. Absent in a request means 1."""

HEADER_METADATA: Final = "Graphstash-Metadata"
"""PUT request and GET/HEAD response: base64url (no padding) of `ArtifactMetadata` as JSON."""

HEADER_JOB: Final = "Graphstash-Job"
"""Request: the caller's job, as a manifest name. The history counts by job. A malformed name is
ignored."""

HEADER_LEASE: Final = "Graphstash-Lease"
"""PUT and DELETE of a lease: the token that the grant returned."""

HEADER_HITS: Final = "Graphstash-Hits"
"""HEAD response: number of times the artifact was served until the last flush of counters."""

HEADER_ACCEPT_REDIRECT: Final = "Graphstash-Accept-Redirect"
"""GET request: `1` if the client accepts a 307 to the blob. Otherwise the server sends none."""

HEADER_COPY: Final = "Graphstash-Copy"
"""GET request: `1` if the client copies the artifact without using it, as an export does. The
server counts neither a hit nor a miss, but counts the served bytes."""

HEADER_WRITERS: Final = "Graphstash-Writers"
"""GET request of a manifest: `1` if the answer may number the writers of its entries."""

HEADER_REQUEST_ID: Final = "X-Request-Id"
"""Response: the request's id in the server's log, also in a problem document's `instance`."""

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
"""Media type of every error body (RFC 9457)."""

DEFAULT_MAX_ARTIFACT_BYTES: Final = 4 * 1024**3
"""Default limit for an artifact on the server: 4 GiB. TPU executables of large models reach
hundreds of MB: see docs/benchmarks.md."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Maximum size of an encoded `HEADER_METADATA` value. It stays below the 64 KiB that servers and
proxies allow for all headers together, and below nginx's default of 8 KiB x 4 buffers."""

MAX_DESCRIPTIONS: Final = 32
"""Maximum artifacts that one call describes."""

MAX_DESCRIBE_BYTES: Final = 1024**2
"""Maximum body of such a call. A publisher sends fewer descriptions if they are long."""

MAX_LOOKUP_KEYS: Final = 1000
"""Maximum keys in one look-up. A bulk query of about 2,000 made Cachix answer 502 (cachix#322)."""

MAX_MANIFEST_ENTRIES: Final = 4096
"""Maximum artifacts in a manifest, which drops the least recently used entries first."""

LOOKUP_PIN_SECONDS: Final = 600
"""Seconds during which a key found by a look-up is not evicted, so that the next GET finds it. An
upload that needs the space still evicts it."""

MIN_LEASE_SECONDS: Final = 1.0
"""Minimum duration of a lease, in seconds."""

DEFAULT_LEASE_SECONDS: Final = 30.0
"""Seconds that a client requests. Three heartbeats fit. A killed holder delays other jobs by at
most this long."""

MAX_LEASE_SECONDS: Final = 600.0
"""Maximum duration of a lease, in seconds. A holder renews instead of requesting more."""

MAX_WAIT_SECONDS: Final = 60.0
"""Maximum `Prefer: wait=` of one call, in seconds. A server cuts longer waits."""
