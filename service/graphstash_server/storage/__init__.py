"""Blob stores, which hold the bytes of artifacts. The database maps each artifact to its blob."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from graphstash_server.errors import StartError
from graphstash_server.settings import Settings
from graphstash_server.storage.base import BlobReader, BlobStore
from graphstash_server.storage.disk import DiskBlobStore
from graphstash_server.storage.files import SMALL_BYTES, FileReader
from graphstash_server.storage.tier import TieredBlobStore

if TYPE_CHECKING:
    from graphstash_server.storage.objects import ObjectBlobStore
    from graphstash_server.tracing import Tracing

__all__ = [
    "SMALL_BYTES",
    "BlobReader",
    "BlobStore",
    "DiskBlobStore",
    "FileReader",
    "TieredBlobStore",
    "open_blob_store",
]

_StoreT = TypeVar("_StoreT", bound=BlobStore)

_LIBRARIES = {"s3": "boto3", "gcs": "google-cloud-storage", "azure": "obstore"}


@asynccontextmanager
async def open_blob_store(
    settings: Settings, *, tracing: "Tracing | None" = None
) -> AsyncIterator[BlobStore]:
    """Open the blob store that the settings name, and close it on exit.

    With `tracing`, each call of the store becomes a span. A tier and the bucket behind it have
    separate spans.

    Raises:
        OSError: a directory of the store cannot be created or written.
        StartError: the client library is not installed, or the bucket cannot be used.
    """
    async with AsyncExitStack() as stack:
        if settings.blob_store == "disk":
            disk = await asyncio.to_thread(
                DiskBlobStore, settings.blob_dir, min_free_bytes=settings.min_free_bytes
            )
            stack.push_async_callback(disk.close)
            yield _traced(disk, "disk", tracing)
            return
        bucket = await asyncio.to_thread(_open_bucket, settings)
        bucket = _traced(bucket, settings.blob_store, tracing)
        stack.push_async_callback(bucket.close)
        if not settings.tier_limit_bytes:
            yield bucket
            return
        tier = await asyncio.to_thread(
            TieredBlobStore,
            bucket,
            settings.tier_dir,
            limit_bytes=settings.tier_limit_bytes,
            min_free_bytes=settings.min_free_bytes,
        )
        stack.push_async_callback(tier.close)
        yield _traced(tier, "tier", tracing)


def _traced(store: _StoreT, name: str, tracing: "Tracing | None") -> _StoreT:
    if tracing is not None:
        from graphstash_server.storage.traced import trace_store

        trace_store(store, name, tracing)
    return store


def _open_bucket(settings: Settings) -> "ObjectBlobStore":
    """Open the bucket. Import its client library here, because it is optional and takes a third of
    a second.
    """
    kind = settings.blob_store
    try:
        opener = import_module(f"graphstash_server.storage.{kind}")
    except ModuleNotFoundError as error:
        raise StartError(
            f"GRAPHSTASH_BLOB_STORE={kind} needs {_LIBRARIES[kind]} ({error.name} is missing): "
            f"pip install 'graphstash[server,{kind}] @ git+<repository>'"
        ) from error
    store: ObjectBlobStore = opener.open_store(settings)
    return store
