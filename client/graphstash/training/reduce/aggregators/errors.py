"""AggregationError: sums through aggregators that came to an end. See `graphstash.errors`."""

from graphstash.errors import GraphstashError

__all__ = ["AggregationError"]


class AggregationError(GraphstashError, RuntimeError):
    """A worker or an aggregator is gone, late or at odds with the others; says which.

    Every rank is told. The tensor is partly added up, and the session is over: make another one.
    """
