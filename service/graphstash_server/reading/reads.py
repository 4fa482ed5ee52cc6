"""Reads: decides the answer to a GET or HEAD of an artifact.

Two front ends call it: `fast` works on the bytes of the connection, `api.artifacts` on FastAPI's
requests. One class answers for both, so that their answers and counts are equal.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

from graphstash_schema import NamespacePolicy
from graphstash_server.artifact import Artifact
from graphstash_server.context import ProcessContext
from graphstash_server.keys import StoredKey
from graphstash_server.reading.representation import (
    Representation,
    description_of,
    may_redirect,
    may_replace,
    redirect_to,
    representation_of,
)
from graphstash_server.storage import SMALL_BYTES, BlobReader, FileReader

__all__ = ["ReadAnswer", "ReadRequest", "Reads", "Unanswered"]


class ReadRequest(NamedTuple):
    """A GET or HEAD of an artifact that the client is authorized to read.

    Attributes:
        key: key of the artifact.
        is_head: whether the method is HEAD.
        headers: headers that can change the answer, by lower-case name; others may be present.
        policy: policy of the namespace.
        job: job named in the request, or "".
        is_copy: whether the download is a copy, which counts neither as a hit nor as a miss.
    """

    key: StoredKey
    is_head: bool
    headers: Mapping[str, str]
    policy: NamespacePolicy
    job: str
    is_copy: bool


class Unanswered(Enum):
    """Why there is no `ReadAnswer`."""

    ABSENT = auto()
    """The artifact does not exist."""

    BLOCKED = auto()
    """Answering has to wait for the database or the disk: call `answer`."""


class ReadAnswer(NamedTuple):
    """An answer to send.

    Attributes:
        representation: status and headers.
        body: bytes to send, if they were read already.
        reader: otherwise the open blob. The front end sends its range `representation.span`, and
            closes it.
    """

    representation: Representation
    body: bytes | bytearray = b""
    reader: BlobReader | None = None


_ABSENT: Final = Unanswered.ABSENT
_BLOCKED: Final = Unanswered.BLOCKED


class Reads:
    """Answers reads of artifacts, and counts hits, misses and bytes."""

    __slots__ = ("_accounting", "_artifacts", "_region", "_settings")

    def __init__(self, context: ProcessContext) -> None:
        self._artifacts = context.artifacts
        self._accounting = context.accounting
        self._region = context.region
        self._settings = context.settings

    def answer_now(self, request: ReadRequest) -> ReadAnswer | Unanswered:
        """Return the answer, or why there is none without blocking.

        Raises:
            ServerError: 416 if the range holds no byte.
        """
        artifacts = self._artifacts
        found = artifacts.find_now(request.key)
        if found is None:
            return _BLOCKED
        if not found:
            return self._absent(request) if self._region is None else _BLOCKED
        (row,) = found
        if not request.is_head and (blob := artifacts.read_now(row)) is not None:
            return self._small_hit(request, row, blob)
        file = artifacts.open_now(row)
        if file is None:
            return _BLOCKED
        if request.is_head:
            file.close_now()
            return ReadAnswer(description_of(row, request.headers, request.policy))
        try:
            answer = self._hit(request, row, file)
        except BaseException:
            file.close_now()
            raise
        if answer.reader is not file:
            file.close_now()
        return answer

    async def answer(self, request: ReadRequest) -> ReadAnswer | Literal[Unanswered.ABSENT]:
        """Return the answer, after waiting for the database, the blob store and, in a region, the
        upstream if necessary.

        Raises:
            ServerError: 416 if the range holds no byte; 503 if the database or the blob store does
                not answer, or the artifact is on its way from the upstream.
        """
        answer = await self._answer_here(request)
        region = self._region
        if (
            answer is _ABSENT
            and region is not None
            and await region.fetches.fetch(request.key, request.policy)
        ):
            answer = await self._answer_here(request)
        return self._absent(request) if answer is _ABSENT else answer

    async def _answer_here(self, request: ReadRequest) -> ReadAnswer | Literal[Unanswered.ABSENT]:
        """Return the answer from this server's store. Counts no miss."""
        if request.is_head:
            found = await self._artifacts.find(request.key)
            if found is None:
                return _ABSENT
            return ReadAnswer(description_of(found, request.headers, request.policy))
        if may_redirect(self._settings, request.headers):
            linked = await self._artifacts.link(request.key)
            if linked is not None:
                return self._redirect(request, *linked)
        artifact = await self._artifacts.open(request.key)
        if artifact is None:
            return _ABSENT
        try:
            answer = self._hit(request, artifact.row, artifact.reader)
        except BaseException:
            await artifact.reader.close()
            raise
        if answer.reader is not artifact.reader:
            await artifact.reader.close()
        return answer

    def count_sent(self, request: ReadRequest, sent_bytes: int) -> None:
        """Count bytes that the front end sent from an answer's reader."""
        self._accounting.count_served(request.key, sent_bytes=sent_bytes, job=request.job)

    def _absent(self, request: ReadRequest) -> Literal[Unanswered.ABSENT]:
        if not (request.is_head or request.is_copy):
            self._accounting.count_miss(request.key, job=request.job)
        return _ABSENT

    def _redirect(self, request: ReadRequest, row: Artifact, url: str) -> ReadAnswer:
        if not request.is_copy:
            self._accounting.count_hit(
                request.key, saved_seconds=row.compile_seconds, job=request.job
            )
        return ReadAnswer(redirect_to(url, row, is_replaceable=may_replace(request.policy)))

    def _small_hit(self, request: ReadRequest, row: Artifact, blob: bytearray) -> ReadAnswer:
        """Answer a GET with a blob that is in memory."""
        representation = self._represent(request, row, None)
        self._count(request, row, representation, sent_bytes=representation.served_bytes)
        start, stop = representation.span or (0, 0)
        return ReadAnswer(representation, blob if stop - start == len(blob) else blob[start:stop])

    def _hit(self, request: ReadRequest, row: Artifact, reader: BlobReader) -> ReadAnswer:
        """Answer a GET. The caller closes the reader if the answer does not contain it."""
        representation = self._represent(request, row, reader)
        if representation.span is None:  # a 304, or the reverse proxy sends the bytes
            self._count(request, row, representation, sent_bytes=representation.served_bytes)
            return ReadAnswer(representation)
        if isinstance(reader, FileReader) and representation.served_bytes <= SMALL_BYTES:
            body = reader.read_now(*representation.span)
            if body is not None:
                self._count(request, row, representation, sent_bytes=len(body))
                return ReadAnswer(representation, body)
        self._count(request, row, representation, sent_bytes=0)  # `count_sent` counts the bytes
        return ReadAnswer(representation, reader=reader)

    def _represent(
        self, request: ReadRequest, row: Artifact, reader: BlobReader | None
    ) -> Representation:
        return representation_of(
            row, request.headers, request.policy, file=reader, settings=self._settings
        )

    def _count(
        self,
        request: ReadRequest,
        row: Artifact,
        representation: Representation,
        *,
        sent_bytes: int,
    ) -> None:
        accounting = self._accounting
        if not request.is_copy:
            accounting.count_answer(
                request.key,
                representation.served,
                saved_seconds=row.compile_seconds,
                job=request.job,
                sent_bytes=sent_bytes,
            )
        elif sent_bytes:
            accounting.count_served(request.key, sent_bytes=sent_bytes, job=request.job)
