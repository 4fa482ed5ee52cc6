"""Whether a blob is whole: the question before an artifact is dropped because its bytes are wrong.

Bytes are also damaged on their way from a store, and then they are others at the next read. So a
blob is read again before it is called damaged: several reads in a row have to give the same wrong
bytes.
"""

import asyncio

from graphstash_schema import Digest, DigestHasher, ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.storage.base import BlobStore

__all__ = ["read_whole"]

_READS = 3


async def read_whole(store: BlobStore, digest: Digest) -> bool | None:
    """Whether the bytes in a store without a cache are those of a digest; None when there are none.
    Reads all of them, once if they are.

    Raises:
        ServerError: 503, when the store does not answer, a read breaks off, or the reads differ:
            the blob may be whole.
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
    """Of what is stored under the digest; None when there is nothing."""
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
