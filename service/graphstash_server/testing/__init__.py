"""Test support, which needs pytest. The product does not import this package."""

from graphstash_server.testing.memory import MemoryBlobStore
from graphstash_server.testing.servers import LiveServer, ServerProcess, migrated_database
from graphstash_server.testing.stores import BlobStoreContract, as_chunks, read_blob

__all__ = [
    "BlobStoreContract",
    "LiveServer",
    "MemoryBlobStore",
    "ServerProcess",
    "as_chunks",
    "migrated_database",
    "read_blob",
]
