"""Verify a stored blob before its artifact is dropped for wrong bytes.

Bytes that are damaged on their way from the store differ in the next read. So a blob counts as
damaged only if all of `_READS` reads return the same wrong bytes.
"""

import asyncio

from graphstash_schema import Digest, DigestHasher, ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.storage.base import BlobStore

__all__ = ["read_whole"]

_READS = 3


async def read_whole(store: BlobStore, digest: Digest) -> bool | None:
    """Return whether a blob's bytes match its digest, or None if the blob is absent.

    `store` must not cache. One read suffices if the bytes match.

    Raises:
        ServerError: 503, if the store does not respond, a read breaks off, or the reads differ. The
            blob may be intact.
    """
    wrong: set[Digest] = set()
    for _ in range(_READS):
        found = await _digest_of(store, digest)
        if found is None or found == digest:
            return None if found is None else True
        wrong.add(found)
    if len(wrong) > 1:
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"{_READS} reads of the blob {digest} gave {len(wrong)} different wrong results, so "
            "its bytes are damaged on their way from the store: check the network and the memory "
            "of the hosts between, then retry",
        )
    return False


async def _digest_of(store: BlobStore, digest: Digest) -> Digest | None:
    reader = await store.open(digest)
    if reader is None:
        return None
    hasher = DigestHasher()
    try:
        async for chunk in reader.chunks(0, reader.size_bytes):
            await asyncio.to_thread(hasher.update, chunk)
    except ShortBlobError as error:
        raise ServerError(
            ErrorCode.UNAVAILABLE, f"blob {digest} could not be read completely: retry later"
        ) from error
    finally:
        await reader.close()
    return hasher.digest()
