"""Test support: a blob store in memory, the contract of every blob store, and live servers. The
product does not import this package. It needs pytest.
"""

from graphstash_server.testing.memory import MemoryBlobStore
from graphstash_server.testing.servers import LiveServer, ServerProcess
from graphstash_server.testing.stores import BlobStoreContract, as_chunks, read_blob

__all__ = [
    "BlobStoreContract",
    "LiveServer",
    "MemoryBlobStore",
    "ServerProcess",
    "as_chunks",
    "read_blob",
]
