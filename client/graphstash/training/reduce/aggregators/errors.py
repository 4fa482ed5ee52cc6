"""AggregationError: a session with aggregators that failed. See `graphstash.errors`."""

from graphstash.errors import GraphstashError

__all__ = ["AggregationError"]


class AggregationError(GraphstashError, RuntimeError):
    """A worker or an aggregator is dead, late or inconsistent with the others; names it.

    Every rank gets the error. The tensor holds sums only in part, and the session is over: create
    another `AggregatedAllReduce`.
    """
