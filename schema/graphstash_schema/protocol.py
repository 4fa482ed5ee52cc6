"""Constants of the wire protocol: version, header names, paths and limits.

Everything here is wire format, version 1. A change that an old client or an old server would
misread needs a new `PROTOCOL_VERSION` and a golden file beside the old one (tests/unit).
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
"""Sent by every client in `HEADER_PROTOCOL`; a server refuses a version it does not speak."""

API_PREFIX: Final = "/v1"
"""First path segment of every call that belongs to a namespace: `/v1/{namespace}/...`."""

ADMIN_PREFIX: Final = "/v1/-"
"""What begins the path of every call that belongs to no namespace: no namespace has that name."""

HEADER_PROTOCOL: Final = "Graphstash-Protocol"
"""Request and response: the wire version, a decimal integer. Absent in a request means 1."""

HEADER_METADATA: Final = "Graphstash-Metadata"
"""PUT request and GET/HEAD response: base64url (no padding) of `ArtifactMetadata` as JSON."""

HEADER_JOB: Final = "Graphstash-Job"
"""Request: the job that the caller is a run of, a manifest name; the history counts by it. One that
is out of form is ignored."""

HEADER_LEASE: Final = "Graphstash-Lease"
"""PUT and DELETE of a lease: the token that the grant returned."""

HEADER_HITS: Final = "Graphstash-Hits"
"""HEAD response: how often the artifact was served until the last flush of the counters."""

HEADER_ACCEPT_REDIRECT: Final = "Graphstash-Accept-Redirect"
"""GET request: `1` when a 307 to where the blob lies is welcome; without it none is sent."""

HEADER_COPY: Final = "Graphstash-Copy"
"""GET request: `1` when the artifact is copied, not used, as an export does: neither a hit nor a
miss. Its bytes count as served."""

HEADER_REQUEST_ID: Final = "X-Request-Id"
"""Response: names the request in the server's log; also `instance` of a problem document."""

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
"""Media type of every error body (RFC 9457)."""

DEFAULT_MAX_ARTIFACT_BYTES: Final = 4 * 1024**3
"""Largest artifact a server takes unless configured otherwise: 4 GiB (TPU executables of large
models reach hundreds of MB; see docs/benchmarks.md)."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Largest `HEADER_METADATA` value, encoded: stays under the 64 KiB that servers and proxies allow
for all headers together, and under nginx's default of 8 KiB x 4 buffers."""

MAX_DESCRIPTIONS: Final = 32
"""Most artifacts that one call describes."""

MAX_DESCRIBE_BYTES: Final = 1024**2
"""Largest body of such a call; a publisher sends fewer descriptions where they are long."""

MAX_LOOKUP_KEYS: Final = 1000
"""Most keys in one lookup. A bulk query of about 2,000 made Cachix answer 502 (cachix#322)."""

MAX_MANIFEST_ENTRIES: Final = 4096
"""Most artifacts that a manifest remembers; the least recently used ones go first."""

LOOKUP_PIN_SECONDS: Final = 600
"""How long a key found by a lookup is safe from eviction, so that it outlives the next GET. An
upload that needs its room gets it all the same."""

MIN_LEASE_SECONDS: Final = 1.0
"""Shortest lease a server grants."""

DEFAULT_LEASE_SECONDS: Final = 30.0
"""What a client asks for: three heartbeats fit, and a killed holder costs at most this long."""

MAX_LEASE_SECONDS: Final = 600.0
"""Longest lease a server grants; a holder renews rather than asking for more."""

MAX_WAIT_SECONDS: Final = 60.0
"""Longest `Prefer: wait=` that a server honours in one call; a longer wait is cut to this."""
