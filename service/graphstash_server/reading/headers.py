"""Request headers of a read: those that change its answer, and those that cannot.

A request with any other header takes the application's path, because a later release may give the
header a meaning. `strangers` names such headers for the operator.
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

__all__ = ["CONDITIONAL", "READ", "relevant_name", "strangers"]

CONDITIONAL: Final = {name.encode(): name for name in (*CONDITIONS, ACCEPT_REDIRECT)}
"""Headers that select the representation, see `reading.representation`."""

READ: Final = frozenset(
    {
        *(b"host", b"connection", b"authorization", *CONDITIONAL),
        *(
            name.lower().encode()
            for name in (HEADER_REQUEST_ID, HEADER_JOB, HEADER_COPY, HEADER_PROTOCOL)
        ),
    }
)
"""Headers on which the answer to a read depends. At most one of each is allowed."""

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
"""Headers that describe a client, a proxy or a trace. A read ignores `Cookie`, because a session
signs a browser in to the dashboard only. It ignores `Origin`, which restricts changes only."""

_FAMILIES: Final = re.compile(
    rb"(?:cf|sec|x-amz-cf|x-amzn|x-arr|x-azure|x-b3|x-datadog|x-envoy|x-forwarded|x-original-"
    rb"forwarded|x-ot|x-varnish)(?:-[a-z0-9]+)+"
)
"""Headers that browsers, load balancers and tracers add under a prefix of their own."""

_MAX_KEPT_BYTES: Final = 64
"""Maximum length of a cached name. A caller without a token may send names of any length."""


def relevant_name(name: bytes) -> bytes | None:
    """Return a header's lower-case name, or None for a header that every read ignores."""
    return _kept(name) if len(name) <= _MAX_KEPT_BYTES else _relevant_name(name)


def _relevant_name(name: bytes) -> bytes | None:
    lower = name.lower()
    return None if lower in _IGNORED or _FAMILIES.fullmatch(lower) else lower


_kept: Final = lru_cache(1024)(_relevant_name)


def strangers(names: Iterable[bytes]) -> list[str]:
    """Return which of a request's headers keep it from the fast path: unknown and repeated ones."""
    counts = Counter(map(relevant_name, names))
    del counts[None]
    return [
        name.decode("latin-1")
        for name, count in counts.items()
        if name is not None and (count > 1 or name not in READ)
    ]
