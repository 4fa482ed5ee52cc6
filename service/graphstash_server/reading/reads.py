"""Reads: decides the answer to a GET or HEAD of an artifact.

Two transports carry requests and answers: `fast` reads and writes the bytes of the connection, and
`api.artifacts` goes through FastAPI. Both ask here, so that their answers and counts are equal.
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
    changes,
    description_of,
    redirect_to,
    representation_of,
    takes_link,
)
from graphstash_server.storage import SMALL_BYTES, BlobReader, FileReader

__all__ = ["ReadAnswer", "ReadRequest", "Reads", "Unanswered"]


class ReadRequest(NamedTuple):
    """A request that its caller may make.

    Attributes:
        key: the artifact.
        is_head: whether the method is HEAD.
        asked: the request's headers, with names in lower case; headers that do not change the
            answer may be left out.
        policy: the policy of the namespace.
        job: the job that asks; empty if the request names none.
        is_copy: whether the download is a copy, which counts neither as a hit nor as a miss.
    """

    key: StoredKey
    is_head: bool
    asked: Mapping[str, str]
    policy: NamespacePolicy
    job: str
    is_copy: bool


class Unanswered(Enum):
    """Why there is no answer."""

    ABSENT = auto()
    """The artifact does not exist."""

    BLOCKED = auto()
    """The answer needs a database query or a file that is not in memory."""


class ReadAnswer(NamedTuple):
    """An answer.

    Attributes:
        representation: status and headers.
        body: the bytes, if they were read already.
        reader: otherwise, sends `representation.span`; the transport closes it.
    """

    representation: Representation
    body: bytes | bytearray = b""
    reader: BlobReader | None = None


_ABSENT: Final = Unanswered.ABSENT
_BLOCKED: Final = Unanswered.BLOCKED


class Reads:
    """The read path of a server."""

    __slots__ = ("_accounting", "_artifacts", "_settings")

    def __init__(self, context: ProcessContext) -> None:
        self._artifacts = context.artifacts
        self._accounting = context.accounting
        self._settings = context.settings

    def answer_now(self, request: ReadRequest) -> ReadAnswer | Unanswered:
        """Return the answer if making it does not block.

        Raises:
            ServerError: 416 if the range holds no byte; 503 if the blob store does not answer.
        """
        artifacts = self._artifacts
        found = artifacts.find_now(request.key)
        if found is None:
            return _BLOCKED
        if not found:
            return self._absent(request)
        (row,) = found
        if not request.is_head and (blob := artifacts.read_now(row)) is not None:
            return self._small_hit(request, row, blob)
        file = artifacts.open_now(row)
        if file is None:
            return _BLOCKED
        if request.is_head:
            file.close_now()
            return ReadAnswer(description_of(row, request.asked, request.policy))
        try:
            answer = self._hit(request, row, file)
        except BaseException:
            file.close_now()
            raise
        if answer.reader is not file:
            file.close_now()
        return answer

    async def answer(self, request: ReadRequest) -> ReadAnswer | Literal[Unanswered.ABSENT]:
        """Return the answer.

        Raises:
            ServerError: 416 if the range holds no byte; 503 if the database or the blob store does
                not answer.
        """
        if request.is_head:
            found = await self._artifacts.find(request.key)
            if found is None:
                return self._absent(request)
            return ReadAnswer(description_of(found, request.asked, request.policy))
        if takes_link(self._settings, request.asked):
            linked = await self._artifacts.link(request.key)
            if linked is not None:
                return self._redirect(request, *linked)
        artifact = await self._artifacts.open(request.key)
        if artifact is None:
            return self._absent(request)
        try:
            answer = self._hit(request, artifact.row, artifact.reader)
        except BaseException:
            await artifact.reader.close()
            raise
        if answer.reader is not artifact.reader:
            await artifact.reader.close()
        return answer

    def count_sent(self, request: ReadRequest, sent_bytes: int) -> None:
        """Count bytes that a transport sent from a reader."""
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
        return ReadAnswer(redirect_to(url, row, changing=changes(request.policy)))

    def _small_hit(self, request: ReadRequest, row: Artifact, blob: bytearray) -> ReadAnswer:
        """Answer a GET with a blob that is in memory."""
        made = self._represent(request, row, None)
        self._count(request, row, made, sent_bytes=made.served_bytes)
        start, stop = made.span or (0, 0)
        return ReadAnswer(made, blob if stop - start == len(blob) else blob[start:stop])

    def _hit(self, request: ReadRequest, row: Artifact, reader: BlobReader) -> ReadAnswer:
        """Answer a GET; the caller closes the reader unless the answer has it."""
        made = self._represent(request, row, reader)
        if made.span is None:  # no bytes, or the proxy in front sends them
            self._count(request, row, made, sent_bytes=made.served_bytes)
            return ReadAnswer(made)
        if isinstance(reader, FileReader) and made.served_bytes <= SMALL_BYTES:
            body = reader.read_now(*made.span)
            if body is not None:
                self._count(request, row, made, sent_bytes=len(body))
                return ReadAnswer(made, body)
        self._count(request, row, made, sent_bytes=0)  # `count_sent` counts the bytes
        return ReadAnswer(made, reader=reader)

    def _represent(
        self, request: ReadRequest, row: Artifact, reader: BlobReader | None
    ) -> Representation:
        return representation_of(
            row, request.asked, request.policy, file=reader, settings=self._settings
        )

    def _count(
        self, request: ReadRequest, row: Artifact, made: Representation, *, sent_bytes: int
    ) -> None:
        accounting = self._accounting
        if not request.is_copy:
            accounting.count_answer(
                request.key,
                made.served,
                saved_seconds=row.compile_seconds,
                job=request.job,
                sent_bytes=sent_bytes,
            )
        elif sent_bytes:
            accounting.count_served(request.key, sent_bytes=sent_bytes, job=request.job)
