"""Patience of commands that transfer many artifacts. Jobs wait less, because they can compile."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO, Final, NoReturn, TypeVar

from graphstash._cli.output import fail, fail_for
from graphstash._http.client import ServerClient
from graphstash.config import ClientConfig
from graphstash.errors import BusyError, CacheError, Reason
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, LookupResponse, Namespace
from graphstash_schema.listing import ArtifactList, ArtifactQuery

__all__ = ["PatientClient", "fail_midway", "retry_while_busy"]

_PATIENCE_SECONDS: Final = 60.0
_MAX_SECONDS: Final = 3600.0
_TRIES: Final = 8

_T = TypeVar("_T")


class PatientClient(ServerClient):
    """A client with long timeouts. It lists, looks up and uploads by `retry_while_busy`."""

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(
            dataclasses.replace(
                config,
                connect_seconds=max(10.0, config.connect_seconds),
                first_byte_seconds=max(_PATIENCE_SECONDS, config.first_byte_seconds),
                fetch_seconds=_MAX_SECONDS,
            )
        )

    def list_artifacts(
        self, query: ArtifactQuery, *, namespace: Namespace | None = None
    ) -> ArtifactList:
        return retry_while_busy(partial(super().list_artifacts, query, namespace=namespace))

    def lookup(
        self, keys: Iterable[ArtifactKey], *, namespace: Namespace | None = None
    ) -> LookupResponse:
        return retry_while_busy(partial(super().lookup, tuple(keys), namespace=namespace))

    def upload(
        self,
        key: ArtifactKey,
        blob: IO[bytes],
        digest: Digest,
        metadata: ArtifactMetadata,
        *,
        withdrawals: str | None = None,
        between_chunks: Callable[[], None] = lambda: None,
    ) -> None:
        send = partial(super().upload, withdrawals=withdrawals, between_chunks=between_chunks)
        retry_while_busy(lambda: send(key, blob, digest, metadata))


def retry_while_busy(call: Callable[[], _T]) -> _T:
    """Make a call, and retry it up to eight times while the server is busy."""
    for _ in range(_TRIES):
        try:
            return call()
        except BusyError as error:
            if error.reason is not Reason.BUSY:
                raise
            time.sleep(min(max(error.retry_after_seconds, 0.1), _PATIENCE_SECONDS))
    return call()


def fail_midway(error: CacheError) -> NoReturn:
    """End a command that the user can run again to continue."""
    if error.reason is Reason.NO_SERVER:
        fail_for(error)
    fail(f"{error.detail}; run it again to continue")
