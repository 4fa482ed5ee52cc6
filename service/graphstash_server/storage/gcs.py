"""GcsBucket: a bucket of Google Cloud Storage, through Google's client library.

Reads bypass the library: it downloads a large object in separate requests, so a deletion in between
would break off a reader. One response of the JSON API has all bytes of one generation.
"""

import os
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, Final, cast
from urllib.parse import quote

import google.auth
import requests
from google.api_core.exceptions import GoogleAPIError, NotFound
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.settings import Settings
from graphstash_server.storage.bucket import (
    THREADS,
    WRITE_THREADS,
    Body,
    Bucket,
    Failure,
    Found,
    Listed,
    Sending,
    one_line,
)
from graphstash_server.storage.objects import ObjectBlobStore

__all__ = ["GcsBucket", "open_store"]

_PART_BYTES: Final = 8 * 1024**2
"""Bytes of a large upload that are in memory."""

_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_EMULATOR: Final = "STORAGE_EMULATOR_HOST"
"""Variable of Google's libraries with the URL of an emulator, which takes no credentials."""

_TIMEOUT: Final = (2.0, 10.0)
"""Seconds to connect, and seconds without a byte."""

_RETRY: Final = DEFAULT_RETRY.with_timeout(30.0)
_RETRY_READS: Final = Retry(
    total=2,
    backoff_factor=0.3,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=("GET", "HEAD"),
)


def open_store(settings: Settings) -> ObjectBlobStore:
    """Open the store in the bucket that the settings name. Blocks.

    Raises:
        OSError: the spool directory cannot be created.
        StartError: the bucket cannot be used.
    """
    return ObjectBlobStore(GcsBucket(settings.gcs_bucket), settings, prefix=settings.gcs_prefix)


class GcsBucket(Bucket):
    """A `Bucket` of Google Cloud Storage. The credentials are the application's default ones."""

    failures = (GoogleAPIError, GoogleAuthError, requests.RequestException, HTTPError, OSError)

    def __init__(self, name: str) -> None:
        """Connect and check that the bucket can be listed. Blocks.

        Raises:
            StartError: the bucket cannot be reached, does not exist or refuses the credentials.
        """
        self.name = name
        self.place = os.environ.get(_EMULATOR) or "https://storage.googleapis.com"
        self._downloads = f"{self.place}/download/storage/v1/b/{quote(name, safe='')}/o"
        try:
            self._session = _session()
            self._client = storage.Client(
                project="-", credentials=self._session.credentials, _http=self._session
            )
            self._bucket = self._client.bucket(name)
            self._require_bucket()
        except (*self.failures, ValueError) as error:
            raise self.unusable("GRAPHSTASH_GCS_BUCKET", error) from error

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> Found | None:
        """See `Bucket.get`."""
        response = self._session.get(
            f"{self._downloads}/{quote(key, safe='')}?alt=media",
            headers={"Accept-Encoding": "identity"}
            | ({} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}),
            stream=True,
            timeout=_TIMEOUT,
        )
        if response.status_code == 404:
            response.close()
            self._require_bucket()
            return None
        try:
            return Found(self._size_of(response, start, stop), cast("Body", response.raw))
        except BaseException:
            response.close()
            raise

    def _size_of(self, response: requests.Response, start: int, stop: int | None) -> int:
        response.raise_for_status()
        if "X-Goog-Generation" not in response.headers:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the response of {self.place} has no X-Goog-Generation, so this is not Google "
                "Cloud Storage: check the proxies between",
            )
        if stop is None:
            return int(response.headers["Content-Length"])
        span, _, size = response.headers.get("Content-Range", "").partition("/")
        if not span.startswith(f"bytes {start}-"):
            raise ShortBlobError(f"{self.name} sent another part than {start}-{stop}")
        return int(size)

    def head(self, key: str) -> Found | None:
        """See `Bucket.head`."""
        found = self._bucket.get_blob(key, timeout=_TIMEOUT, retry=_RETRY)
        return None if found is None else Found(int(found.size), BytesIO())

    def put(self, key: str, sending: Sending, digest: Digest) -> None:
        """Store a blob with a CRC32C, see `Bucket.put`. Google discards an upload in parts that is
        not finished within a week.
        """
        self._bucket.blob(key, chunk_size=_PART_BYTES).upload_from_file(
            sending, size=digest.size_bytes, checksum="crc32c", timeout=_TIMEOUT, retry=_RETRY
        )

    def delete(self, key: str) -> bool:
        """See `Bucket.delete`. There is one attempt."""
        try:
            self._bucket.delete_blob(key, timeout=_TIMEOUT, retry=None)
        except NotFound:
            self._require_bucket()
        return True

    def pages(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """See `Bucket.pages`."""
        for page in self._listing(prefix).pages:
            yield [Listed(each.name, int(each.size), each.updated) for each in page]

    def failure(self, error: BaseException) -> Failure:
        """See `Bucket.failure`."""
        return Failure(one_line(error), _remedy(error))

    def close(self) -> None:
        """See `Bucket.close`."""
        self._client.close()

    def _listing(self, prefix: str, *, max_results: int | None = None) -> Any:
        fields = "items(name,size,updated),nextPageToken"
        return self._client.list_blobs(
            self._bucket,
            prefix=prefix,
            max_results=max_results,
            fields=fields,
            timeout=_TIMEOUT,
            retry=_RETRY,
        )

    def _require_bucket(self) -> None:
        """Raise `NotFound` if the bucket is absent. A listing needs no right beyond the objects."""
        next(iter(self._listing("", max_results=1)), None)


def _session() -> Any:
    credentials: Any = AnonymousCredentials()  # type: ignore[no-untyped-call] # has no types
    if not os.environ.get(_EMULATOR):
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call] # has no types
    for scheme in ("http://", "https://"):
        pool = HTTPAdapter(pool_maxsize=THREADS + WRITE_THREADS, max_retries=_RETRY_READS)
        session.mount(scheme, pool)
    return session


def _remedy(error: BaseException) -> str:
    status = getattr(error, "code", None) or getattr(
        getattr(error, "response", None), "status_code", 0
    )
    if isinstance(error, DefaultCredentialsError):
        return "set GOOGLE_APPLICATION_CREDENTIALS, or give the host a service account"
    if status in {401, 403}:
        return "check that the account has roles/storage.objectUser on the bucket"
    if status == 404:
        return "create the bucket, or fix GRAPHSTASH_GCS_BUCKET"
    return "check that the service can be reached, then retry"
