"""S3Bucket: a bucket of AWS S3, or of another server that speaks its protocol, through boto3.

If a server is killed during an upload in parts, a server that starts a day later aborts the upload.
"""

import base64
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.parsers import ResponseParserError
from s3transfer.manager import TransferConfig, TransferManager
from urllib3.exceptions import HTTPError

from graphstash_schema import Digest, ErrorCode
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.settings import Settings
from graphstash_server.storage.bucket import (
    THREADS,
    WRITE_THREADS,
    Bucket,
    Failure,
    Found,
    Listed,
    Sending,
    one_line,
)
from graphstash_server.storage.objects import ObjectBlobStore

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["MULTIPART_BYTES", "S3Bucket", "open_store"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

MULTIPART_BYTES: Final = 16 * 1024**2
"""Size from which a blob is uploaded in parts."""

_PART_BYTES: Final = 8 * 1024**2
"""Size of a part. S3 accepts 10,000 parts, so the transfer manager enlarges the parts of larger
blobs. All uploads together hold at most `_UPLOAD_REQUESTS` parts in memory."""

_UPLOAD_REQUESTS: Final = 8
"""Maximum number of parts in flight, summed over all uploads of large blobs."""

_LINK_SECONDS: Final = 900
"""Seconds for which a link is valid."""

_CONNECT_SECONDS = 2.0
_READ_SECONDS = 10.0
_ATTEMPTS = 3

_ABANDONED_AGE = timedelta(days=1)
"""Age from which an unfinished upload counts as abandoned. No upload takes this long."""

_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_NO_BUCKET = frozenset({"NoSuchBucket", "404", "NotFound"})
_REFUSED = frozenset({401, 403})


def open_store(settings: Settings) -> ObjectBlobStore:
    """Open the store in the bucket that the settings name. Blocks.

    Raises:
        OSError: the spool directory cannot be created.
        StartError: the bucket cannot be used.
    """
    return _S3BlobStore(S3Bucket(settings), settings)


class S3Bucket(Bucket):
    """A `Bucket` of S3."""

    failures = (ClientError, BotoCoreError, ResponseParserError, HTTPError, OSError)

    def __init__(self, settings: Settings) -> None:
        """Connect and check that the bucket can be used. Blocks.

        Raises:
            StartError: the bucket cannot be reached, does not exist or refuses the credentials.
        """
        self.name = settings.s3_bucket
        self.place = settings.s3_endpoint_url or "AWS"
        self._is_closing = threading.Event()
        try:
            self._client = _connect(settings)
            self._client.head_bucket(Bucket=self.name)
        except (*self.failures, ValueError) as error:
            raise self.unusable("GRAPHSTASH_S3_BUCKET", error) from error
        self._transfers = TransferManager(
            self._client,
            TransferConfig(
                multipart_threshold=MULTIPART_BYTES,
                multipart_chunksize=_PART_BYTES,
                max_request_concurrency=_UPLOAD_REQUESTS,
                max_in_memory_upload_chunks=_UPLOAD_REQUESTS,
            ),
        )

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> Found | None:
        """See `Bucket.get`."""
        get = partial(self._client.get_object, Bucket=self.name, Key=key)
        if stop is not None:
            get = partial(get, Range=f"bytes={start}-{stop - 1}")
        found = self._unless_absent(get)
        if found is None:
            return None
        if stop is None:
            return Found(_size_of(found), found["Body"])
        span, _, size = found.get("ContentRange", "").partition("/")
        if not span.startswith(f"bytes {start}-"):
            found["Body"].close()
            raise ShortBlobError(f"{self.name} sent another part than {start}-{stop}")
        return Found(int(size) if size.isdecimal() else stop, found["Body"])

    def head(self, key: str) -> Found | None:
        """See `Bucket.head`."""
        described = _unless_404(partial(self._client.head_object, Bucket=self.name, Key=key))
        return None if described is None else Found(_size_of(described), BytesIO())

    def put(self, key: str, sending: Sending, digest: Digest) -> None:
        """Store a blob, see `Bucket.put`. If a part fails, the transfer manager aborts the
        upload.
        """
        if digest.size_bytes < MULTIPART_BYTES:
            self._client.put_object(
                Bucket=self.name,
                Key=key,
                Body=sending.blob,
                ContentLength=digest.size_bytes,
                ChecksumSHA256=base64.b64encode(bytes.fromhex(digest.sha256)).decode(),
            )
            return
        checked = {"ChecksumAlgorithm": "SHA256"}
        upload = self._transfers.upload(sending.blob, self.name, key, extra_args=checked)
        sending.follow(upload)
        upload.result()

    def delete(self, key: str) -> bool:
        """See `Bucket.delete`."""
        response: Mapping[str, Any] = {}

        def send() -> Mapping[str, Any]:
            nonlocal response
            try:
                response = self._client.delete_object(Bucket=self.name, Key=key)
            except ClientError as error:
                response = error.response
                raise
            return response

        self._unless_absent(send)
        return not response["ResponseMetadata"]["RetryAttempts"]

    def pages(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """See `Bucket.pages`."""
        lister = self._client.get_paginator("list_objects_v2")
        for page in lister.paginate(Bucket=self.name, Prefix=prefix):
            yield [
                Listed(each["Key"], each["Size"], each["LastModified"])
                for each in page.get("Contents", ())
            ]

    def link(self, key: str) -> str:
        """Return a URL from which anyone can download the object for `_LINK_SECONDS`."""
        return self._client.generate_presigned_url(
            "get_object", Params={"Bucket": self.name, "Key": key}, ExpiresIn=_LINK_SECONDS
        )

    def tidy(self, prefix: str) -> None:
        """Abort multipart uploads that began more than `_ABANDONED_AGE` ago by the clock of S3. The
        next start retries after an error.
        """
        try:
            self._abort_abandoned(prefix)
        except Exception as error:  # noqa: BLE001 - outermost frame of the thread
            _LOGGER.warning(
                "could not abort abandoned uploads in %s; will retry at the next start: %s",
                self.name,
                one_line(error),
            )

    def _abort_abandoned(self, prefix: str) -> None:
        lister = self._client.get_paginator("list_multipart_uploads")
        for page in lister.paginate(Bucket=self.name, Prefix=prefix):
            date = page["ResponseMetadata"]["HTTPHeaders"]["date"]
            before = parsedate_to_datetime(date) - _ABANDONED_AGE
            for upload in page.get("Uploads", ()):
                if self._is_closing.is_set():
                    return
                if upload["Initiated"] < before:
                    self._client.abort_multipart_upload(
                        Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def failure(self, error: BaseException) -> Failure:
        """See `Bucket.failure`."""
        return Failure(one_line(error), _remedy(error), is_full=_status(error) == 507)

    def stop(self) -> None:
        """Finish the uploads in parts, and end `tidy` soon."""
        self._is_closing.set()
        self._transfers.shutdown()

    def close(self) -> None:
        """See `Bucket.close`."""
        self._client.close()

    def _unless_absent(self, function: Callable[[], T]) -> T | None:
        """Return the result of a call, or None if only the object is missing.

        Raises:
            ClientError: any other refusal, including a missing bucket.
        """
        result = _unless_404(function)
        if result is None:
            self._client.head_bucket(Bucket=self.name)  # a gateway may respond 404 to every request
        return result


class _S3BlobStore(ObjectBlobStore):
    """An `ObjectBlobStore` that can redirect readers to S3."""

    def __init__(self, bucket: S3Bucket, settings: Settings) -> None:
        super().__init__(bucket, settings, prefix=settings.s3_prefix)
        self._s3 = bucket
        self._redirect_bytes = settings.s3_redirect_bytes

    async def link(self, digest: Digest) -> str | None:
        """See `BlobStore.link`. The URL is signed."""
        if self._redirect_bytes is None or digest.size_bytes < self._redirect_bytes:
            return None
        # Signing does not block, but renewing the credentials beforehand may.
        return await self._call("sign a link", partial(self._s3.link, self._keys(digest)[0]))


def _unless_404(function: Callable[[], T]) -> T | None:
    """Return the result of a call, or None if the object is missing.

    A HEAD request for an object of a missing bucket also returns None.

    Raises:
        ClientError: any other refusal.
    """
    try:
        return function()
    except ClientError as error:
        if error.response["Error"].get("Code") not in _ABSENT:
            raise
        return None


def _size_of(found: Mapping[str, Any]) -> int:
    """Return the object size in a response. Close the response before raising `unavailable`: an
    error page of a proxy must not look like a damaged blob.
    """
    if "ETag" not in found or "ContentLength" not in found:
        if "Body" in found:
            found["Body"].close()  # otherwise the connection stays open until garbage collection
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            "the response of the blob store has no ETag or no length, so this is not an S3 server: "
            "fix GRAPHSTASH_S3_ENDPOINT_URL",
        )
    return int(found["ContentLength"])


def _connect(settings: Settings) -> "S3Client":
    """Return a client that finds its credentials in the standard AWS chain. It adds no checksum
    that a call does not ask for, because some S3 implementations reject checksums.
    """
    config = Config(
        signature_version="s3v4",
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=THREADS + WRITE_THREADS + _UPLOAD_REQUESTS,
        s3={"addressing_style": settings.s3_addressing},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="graphstash",
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.s3_endpoint_url,
        region_name=settings.s3_region,
        config=config,
    )


def _status(error: BaseException) -> int:
    if isinstance(error, ClientError):
        return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def _code(error: BaseException) -> str:
    return str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""


def _remedy(error: BaseException) -> str:
    if _status(error) in _REFUSED:
        return (
            "check the credentials, the clock, and that the policy allows s3:ListBucket, "
            "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload"
        )
    if _code(error) in _NO_BUCKET:
        return "create the bucket, or fix GRAPHSTASH_S3_BUCKET or GRAPHSTASH_S3_ENDPOINT_URL"
    if isinstance(error, NoCredentialsError):
        return "set credentials in one of the ways of AWS, e.g. AWS_ACCESS_KEY_ID"
    return "check that GRAPHSTASH_S3_ENDPOINT_URL is up and can be reached, then retry"
