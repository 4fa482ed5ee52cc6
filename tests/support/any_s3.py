"""The S3 that a test runs on: moto's, Swift's, or one that runs already, such as a Ceph."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from support.moto import AnyS3, Moto, s3_client
from support.swift import Swift

__all__ = ["RunningS3", "open_s3"]


class RunningS3(AnyS3):
    """A context manager; the buckets that it made stay there.

    Args:
        url: `http://<access key>:<secret key>@<host>:<port>`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not (parts.hostname and parts.port and parts.password):
            raise ValueError(f"{url!r} is not of the form http://ACCESS_KEY:SECRET_KEY@HOST:PORT")
        self.url = f"http://{parts.hostname}:{parts.port}"
        self.access_key, self.secret_key = parts.username or "", parts.password

    def __enter__(self) -> Self:
        self.client = s3_client(self.url, access_key=self.access_key, secret_key=self.secret_key)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def open_s3(which: str, directory: Path) -> AbstractContextManager[AnyS3]:
    """The one that is meant by `moto`, `swift` or a URL; `directory` takes the files of Swift."""
    if which == "moto":
        return Moto()
    if which == "swift":
        directory.mkdir()
        return Swift(directory)
    return RunningS3(which)
