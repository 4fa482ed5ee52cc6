"""Bucket: one S3 bucket, its thread pool, and the translation of its errors.

The server trusts only two responses: the object, and "no such key" from a bucket that exists. Every
other response becomes a `ServerError`. A store that cannot be reached must never look like a store
that lost its blobs.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from graphstash_schema import ErrorCode
from graphstash_server.errors import NoSpaceError, ServerError, StartError
from graphstash_server.settings import Settings
from graphstash_server.storage.base import ThrottledLog

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["FAILURES", "UPLOAD_REQUESTS", "WRITE_THREADS", "Bucket"]

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES: Final = (ClientError, BotoCoreError, ResponseParserError, HTTPError, OSError)
"""Every exception that boto3 raises if a bucket fails."""

_THREADS = 32
"""Maximum number of concurrent calls, besides uploads. The threads wait for the network and cost
little."""

WRITE_THREADS = 16
"""Maximum number of uploads that write a spool, or send a small blob, at the same time."""

UPLOAD_REQUESTS = 8
"""Maximum number of parts in flight, summed over all uploads of large blobs."""

_CONNECT_SECONDS = 2.0
_READ_SECONDS = 10.0
_ATTEMPTS = 3

_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_NO_BUCKET = frozenset({"NoSuchBucket", "404", "NotFound"})
_REFUSED = frozenset({401, 403})


class Bucket:
    """One S3 bucket. Safe for concurrent threads. Calls of the boto3 `client` block and raise
    `FAILURES`; `call` runs them in `threads`.
    """

    def __init__(self, settings: Settings) -> None:
        """Connect and check that the bucket can be used. Blocks.

        Raises:
            StartError: the bucket cannot be reached, does not exist or refuses the credentials.
        """
        self.name = settings.s3_bucket
        self._endpoint = settings.s3_endpoint_url or "AWS"
        self._log = ThrottledLog(_LOGGER)
        self._is_closing = threading.Event()
        try:
            self.client = _connect(settings)
            self.client.head_bucket(Bucket=self.name)
        except (*FAILURES, ValueError) as error:
            raise StartError(
                f"GRAPHSTASH_S3_BUCKET={self.name} cannot be used at {self._endpoint} "
                f"({_cause(error)}): {_remedy(error)}"
            ) from error
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="s3")

    async def call(self, operation: str, function: Callable[[], T]) -> T:
        """Run `function` in a thread.

        Raises:
            ServerError: the bucket failed or did not respond.
        """
        with self.failures_named(operation):
            return await asyncio.get_running_loop().run_in_executor(self.threads, function)

    @contextmanager
    def failures_named(self, operation: str) -> Iterator[None]:
        """Turn one of `FAILURES` into `NoSpaceError` (507) or `ServerError` (`unavailable`)."""
        try:
            yield
        except FAILURES as error:
            detail = (
                f"the bucket {self.name} at {self._endpoint} failed to {operation} "
                f"({_cause(error)}): {_remedy(error)}"
            )
            self._log.warning(detail)
            if _status(error) == 507:
                raise NoSpaceError(detail) from error
            raise ServerError(ErrorCode.UNAVAILABLE, detail) from error

    def unless_absent(self, function: Callable[[], T]) -> T | None:
        """Return the result of a call, or None if only the object is missing. Blocks.

        Raises:
            ClientError: any other refusal, including a missing bucket.
        """
        result = self.unless_404(function)
        if result is None:
            self.client.head_bucket(Bucket=self.name)  # a gateway may respond 404 to every request
        return result

    def unless_404(self, function: Callable[[], T]) -> T | None:
        """Return the result of a call, or None if the object is missing. Blocks.

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

    def close(self) -> None:
        """Wait for the threads. Make no further call. Blocks."""
        self._is_closing.set()
        self.threads.shutdown()
        self.client.close()

    def abort_abandoned(self, prefix: str, *, older_than: timedelta) -> None:
        """Abort multipart uploads that began more than `older_than` ago by the clock of S3. Blocks.
        This is the outermost frame of its thread, so it logs errors. The next start retries.
        """
        try:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.name, Prefix=prefix
            )
            for page in pages:
                date = page["ResponseMetadata"]["HTTPHeaders"]["date"]
                before = parsedate_to_datetime(date) - older_than
                for upload in page.get("Uploads", ()):
                    if self._is_closing.is_set():
                        return
                    if upload["Initiated"] < before:
                        self.client.abort_multipart_upload(
                            Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
        except Exception as error:  # noqa: BLE001 - outermost frame of the thread
            _LOGGER.warning(
                "could not abort abandoned uploads in %s; will retry at the next start: %s",
                self.name,
                _cause(error),
            )


def _connect(settings: Settings) -> "S3Client":
    """Return a client that finds its credentials in the standard AWS chain. It adds no checksum
    that a call does not ask for, because some S3 implementations reject checksums.
    """
    config = Config(
        signature_version="s3v4",
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=_THREADS + WRITE_THREADS + UPLOAD_REQUESTS,
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


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
