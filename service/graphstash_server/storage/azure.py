"""AzureBucket: a container of Azure Blob Storage, through obstore.

obstore finds the account and its credentials in the variables AZURE_STORAGE_*, or asks the host for
its managed identity. An upload in parts becomes visible as a whole or not at all; Azure discards
unfinished parts after a week.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from io import BytesIO
from typing import Any, BinaryIO, Final, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore

from graphstash_schema import Digest
from graphstash_server.errors import ShortBlobError
from graphstash_server.settings import Settings
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.storage.bucket import Bucket, Failure, Found, Listed, Sending, one_line
from graphstash_server.storage.objects import ObjectBlobStore

__all__ = ["AzureBucket", "open_store"]

_MULTIPART_BYTES: Final = 16 * 1024**2
"""Size from which a blob is uploaded in parts."""

_PART_BYTES: Final = 4 * 1024**2
"""Bytes of a part. Azure takes 50,000 parts."""

_RETRY_SECONDS: Final = timedelta(seconds=30)
_CONCURRENT_PARTS: Final = 2
"""Parts of one upload in flight."""


def open_store(settings: Settings) -> ObjectBlobStore:
    """Open the store in the container that the settings name. Blocks.

    Raises:
        OSError: the spool directory cannot be created.
        StartError: the container cannot be used.
    """
    bucket = AzureBucket(settings.azure_container)
    return ObjectBlobStore(bucket, settings, prefix=settings.azure_prefix)


class _Stream:
    """The body of a response. obstore returns chunks of its own size."""

    def __init__(self, chunks: Iterator[Any]) -> None:
        self._chunks: Iterator[Any] | None = chunks
        self._rest = memoryview(b"")

    def read(self, amount: int) -> bytes:
        """Return the next bytes, see `Body.read`."""
        while not self._rest and self._chunks is not None:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest = memoryview(chunk)
        taken, self._rest = self._rest[:amount], self._rest[amount:]
        return bytes(taken)

    def close(self) -> None:
        """End the response, see `Body.close`."""
        self._chunks, self._rest = None, memoryview(b"")


class AzureBucket(Bucket):
    """A container as a `Bucket`."""

    failures = (BaseError, OSError)

    def __init__(self, name: str) -> None:
        """Connect and check that the container can be listed. Blocks.

        Raises:
            StartError: the container cannot be reached, does not exist or refuses the credentials.
        """
        self.name = name
        self.place = "Azure"
        try:
            self._store = _connect(name, max_retries=2)
            self._once = _connect(name, max_retries=0)
            self._require_container()
        except (*self.failures, ValueError) as error:
            raise self.unusable("GRAPHSTASH_AZURE_CONTAINER", error) from error

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> Found | None:
        """See `Bucket.get`."""
        options: Any = {} if stop is None else {"range": (start, stop)}
        try:
            found = obstore.get(self._store, key, options=options)
        except FileNotFoundError:
            self._require_container()
            return None
        if stop is not None and found.range[0] != start:
            raise ShortBlobError(f"{self.name} sent another part than {start}-{stop}")
        return Found(found.meta["size"], _Stream(iter(found.stream(min_chunk_size=CHUNK_BYTES))))

    def head(self, key: str) -> Found | None:
        """See `Bucket.head`."""
        try:
            return Found(obstore.head(self._store, key)["size"], BytesIO())
        except FileNotFoundError:
            return None

    def put(self, key: str, sending: Sending, digest: Digest) -> None:
        """See `Bucket.put`."""
        obstore.put(
            self._store,
            key,
            cast("BinaryIO", sending),
            use_multipart=digest.size_bytes >= _MULTIPART_BYTES,
            chunk_size=_PART_BYTES,
            max_concurrency=_CONCURRENT_PARTS,
        )

    def delete(self, key: str) -> bool:
        """See `Bucket.delete`. There is one attempt, because obstore does not count attempts."""
        try:
            obstore.delete(self._once, key)
        except FileNotFoundError:
            self._require_container()
        return True

    def pages(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """Yield a thousand objects at a time, see `Bucket.pages`. obstore lists only whole folders,
        so the objects beside a longer prefix are skipped here.
        """
        folder = prefix.rpartition("/")[0]
        for page in obstore.list(self._store, folder, chunk_size=1000):
            yield [
                Listed(each["path"], each["size"], each["last_modified"])
                for each in page
                if each["path"].startswith(prefix)
            ]

    def failure(self, error: BaseException) -> Failure:
        """See `Bucket.failure`."""
        cause = one_line(error).partition(" Debug source:")[0]
        return Failure(cause, _remedy(error))

    def close(self) -> None:
        """Do nothing: obstore closes its connections with the store."""

    def _require_container(self) -> None:
        """Raise if the container is absent or cannot be listed."""
        next(iter(obstore.list(self._store, chunk_size=1)), None)


def _connect(name: str, *, max_retries: int) -> AzureStore:
    return AzureStore(
        name,
        client_options={
            "connect_timeout": "2s",
            "timeout": "30s",
            "user_agent": "graphstash",
            "allow_http": True,  # for an emulator; the URL of Azure is https
        },
        retry_config={"max_retries": max_retries, "retry_timeout": _RETRY_SECONDS},
    )


def _remedy(error: BaseException) -> str:
    said = type(error).__name__
    if said in {"PermissionDeniedError", "UnauthenticatedError", "PermissionError"}:
        return "check that the account has the role Storage Blob Data Contributor on the container"
    if isinstance(error, FileNotFoundError) or "ContainerNotFound" in str(error):
        return "create the container, or fix GRAPHSTASH_AZURE_CONTAINER"
    return "check AZURE_STORAGE_ACCOUNT_NAME and its credentials, and that Azure can be reached"
