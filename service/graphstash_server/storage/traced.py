"""trace_store: spans for the awaited calls of a blob store."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TypeVar

from opentelemetry.util.types import AttributeValue

from graphstash_schema import Digest
from graphstash_server.storage.base import BlobStore
from graphstash_server.tracing import Tracing

__all__ = ["trace_store"]

T = TypeVar("T")

_CALLS = ("put", "open", "stat", "delete", "is_whole", "link")


def trace_store(store: BlobStore, name: str, tracing: Tracing) -> None:
    """Wrap the calls of a store in spans. Call it for a tier and for the store behind it."""
    for call in _CALLS:
        setattr(store, call, _traced(getattr(store, call), call, name, tracing))


def _traced(
    function: Callable[..., Awaitable[T]], call: str, name: str, tracing: Tracing
) -> Callable[..., Awaitable[T]]:
    @wraps(function)
    async def traced(digest: Digest, *given: object, **named: object) -> T:
        described: dict[str, AttributeValue] = {
            "graphstash.store": name,
            "graphstash.size_bytes": digest.size_bytes,
        }
        with tracing.span(f"blob_store.{call}", **described) as span:
            result = await function(digest, *given, **named)
            if call in ("open", "stat"):
                span.set_attribute("graphstash.is_found", result is not None)
            return result

    return traced
