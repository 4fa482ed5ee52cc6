"""Blob stores: where the bytes are. The database knows which artifact has which blob."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from graphstash_server.settings import Settings
from graphstash_server.storage.base import BlobReader, BlobStore
from graphstash_server.storage.disk import DiskBlobStore

__all__ = ["BlobReader", "BlobStore", "DiskBlobStore", "open_blob_store"]


@asynccontextmanager
async def open_blob_store(settings: Settings) -> AsyncIterator[BlobStore]:
    """Opens the store that the settings name, and closes it again.

    Raises:
        OSError: when the directory cannot be made or written.
    """
    store = await asyncio.to_thread(
        DiskBlobStore, settings.blob_dir, min_free_bytes=settings.min_free_bytes
    )
    try:
        yield store
    finally:
        await store.close()
