"""Request headers of a read: headers that affect the answer, and headers that a read ignores.

A request with another header takes the application's path, because the header may announce a body,
or matter to the parser or a middleware.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from graphstash_schema.protocol import (
    HEADER_COPY,
    HEADER_JOB,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
)
from graphstash_server.reading.representation import ACCEPT_REDIRECT, CONDITIONS

__all__ = ["CONDITIONAL", "READ", "relevant_name", "unrecognized_headers"]

CONDITIONAL: Final = {name.encode(): name for name in (*CONDITIONS, ACCEPT_REDIRECT)}
"""Headers that select the representation (`reading.representation`)."""

READ: Final = frozenset(
    {
        *(b"host", b"connection", b"authorization", *CONDITIONAL),
        *(
            name.lower().encode()
            for name in (HEADER_REQUEST_ID, HEADER_JOB, HEADER_COPY, HEADER_PROTOCOL)
        ),
    }
)
"""Headers that affect the answer to a read."""

_IGNORED: Final = frozenset(
    b"""
    accept accept-charset accept-encoding accept-language baggage b3 cache-control cdn-loop
    client-ip content-language content-type cookie date dnt fastly-client-ip forwarded from
    front-end-https keep-alive origin pragma priority referer save-data sentry-trace
    traceparent tracestate true-client-ip uber-trace-id upgrade-insecure-requests user-agent via
    x-client-ip x-client-trace-id x-cloud-trace-context x-cluster-client-ip x-correlation-id x-proto
    x-real-ip x-requested-with x-request-start x-scheme x-trace-id
    """.split()
)
"""Headers that describe a client, a proxy or a trace. `Cookie` matters to the dashboard only, and
`Origin` to changes only."""

_FAMILIES: Final = re.compile(
    rb"(?:cf|sec|x-amz-cf|x-amzn|x-arr|x-azure|x-b3|x-datadog|x-envoy|x-forwarded|x-original-"
    rb"forwarded|x-ot|x-varnish)(?:-[a-z0-9]+)+"
)
"""Headers of browsers, load balancers and tracers with a prefix of their own."""

_MAX_KEPT_BYTES: Final = 64
"""Maximum length of a cached name, because callers without a token may send any."""


def relevant_name(name: bytes) -> bytes | None:
    """Return a header's lower-case name, or None for a header that every read ignores."""
    return _kept(name) if len(name) <= _MAX_KEPT_BYTES else _relevant_name(name)


def _relevant_name(name: bytes) -> bytes | None:
    lower = name.lower()
    return None if lower in _IGNORED or _FAMILIES.fullmatch(lower) else lower


_kept: Final = lru_cache(1024)(_relevant_name)


def unrecognized_headers(names: Iterable[bytes]) -> list[str]:
    """Return the headers that keep a request from the fast path: unknown and repeated ones."""
    counts = Counter(map(relevant_name, names))
    del counts[None]
    return [
        name.decode("latin-1")
        for name, count in counts.items()
        if name is not None and (count > 1 or name not in READ)
    ]
