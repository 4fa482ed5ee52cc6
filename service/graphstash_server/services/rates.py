"""Rates: how many requests a second a namespace may make of this process.

A bucket per namespace holds the requests of one second, at least one, and fills at the rate of the
namespace's policy. A request takes one out; an empty bucket says when the next one is in it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from graphstash_schema import ErrorCode, Namespace
from graphstash_server.errors import ServerError

__all__ = ["Rates"]

_MAX_BUCKETS = 4096
"""Namespaces whose rate is watched; the least recently used bucket goes, which forgets at most one
second's requests."""


class Rates:
    """Used from the event loop only."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        """Begins with full buckets.

        Args:
            seconds: a clock that never goes back.
        """
        self._seconds = seconds
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, namespace: Namespace, *, per_second: float) -> None:
        """Lets one request in.

        Args:
            namespace: whose bucket.
            per_second: how fast it fills.

        Raises:
            ServerError: 429; `retry_after_seconds` says when one would be let in.
        """
        now = self._seconds()
        most = max(per_second, 1.0)
        rest, since = self._buckets.get(namespace, (most, now))
        rest = min(rest + (now - since) * per_second, most)
        is_in = rest >= 1.0
        self._buckets[namespace] = (rest - 1.0 if is_in else rest, now)
        self._buckets.move_to_end(namespace)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        if not is_in:
            wait_seconds = (1.0 - rest) / per_second
            raise ServerError(
                ErrorCode.RATE_LIMITED,
                f"the namespace {namespace} makes more than {per_second:g} requests a second of "
                f"this server: ask again in {wait_seconds:.3g} s, or let an admin raise the rate "
                f"(graphstash namespace set {namespace} --requests-per-second)",
                limit=per_second,
                retry_after_seconds=wait_seconds,
            )
