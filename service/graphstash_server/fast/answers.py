"""FastPath: reads a request for an artifact and makes its answer."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from starlette.responses import Response

from graphstash_schema import (
    ArtifactKind,
    DeviceType,
    Fingerprint,
    Namespace,
    NamespacePolicy,
)
from graphstash_schema.protocol import (
    HEADER_JOB,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    PROTOCOL_VERSION,
)
from graphstash_server.api.conditions import job_named
from graphstash_server.api.frame import (
    MAX_HEADER_BYTES,
    callers_request_id,
    frame_headers,
    request_ids,
)
from graphstash_server.api.problems import log_refusal, problem_response, refusal_response
from graphstash_server.api.representation import (
    ACCEPT_REDIRECT,
    HEADER_ACCEL,
    MIN_ACCELERATED_BYTES,
    Representation,
    absent,
    changes,
    description_of,
    representation_of,
    takes_link,
    whole_of,
)
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import StoredArtifact
from graphstash_server.services.identity.principals import OPEN_ACCESS, OWNER, Principal
from graphstash_server.storage import SMALL_BYTES, BlobReader, FileReader

__all__ = ["Answer", "FastPath", "FastRequest"]

_TARGET: Final = re.compile(
    rf"/v1/({Namespace.form.pattern})/artifacts/({'|'.join(ArtifactKind)})"
    rf"/({DeviceType.form.pattern})/({Fingerprint.form.pattern})".encode()
)

_READ_HERE: Final = {
    name.encode(): name
    for name in ("if-none-match", "if-range", "range", HEADER_ACCEL, ACCEPT_REDIRECT)
}
"""Headers that change the answer, see `api.representation`."""

_ID: Final = HEADER_REQUEST_ID.lower().encode()
_PROTOCOL: Final = HEADER_PROTOCOL.lower().encode()
_JOB: Final = HEADER_JOB.lower().encode()
_SPOKEN: Final = str(PROTOCOL_VERSION).encode()

_KNOWN: Final = frozenset(
    {
        *(b"host", b"connection", b"authorization", _ID, _JOB, _PROTOCOL, *_READ_HERE),
        # Nothing in the application reads these.
        *(b"accept", b"accept-encoding", b"accept-language", b"cache-control", b"pragma"),
        *(b"user-agent", b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip", b"via"),
        *(b"traceparent", b"tracestate"),
    }
)
"""Headers that may be in a request. Any other one is the application's, even if it ignores it: it
might have learned about it since."""

_NOTHING: Final[Mapping[str, str]] = {}

_ACCEL: Final = {HEADER_ACCEL}

_MAX_KEPT: Final = 1024
"""As many as the rows in memory (`RecentRows`); at most 32 MiB more for each table."""


class FastRequest(NamedTuple):
    """A request that its caller may make, and that counts against the namespace's rate."""

    method: bytes
    path: str
    key: StoredKey
    job: str
    asked: Mapping[str, str]
    policy: NamespacePolicy
    request_id: bytes
    own_id: bytes
    scheme: str
    refusal: ServerError | None

    @property
    def state(self) -> dict[str, str]:
        """Its ids, as the application has them."""
        return {
            "request_id": self.request_id.decode(),
            "server_request_id": self.own_id.decode(),
        }


class Answer(NamedTuple):
    """What is sent.

    Attributes:
        status: of HTTP.
        headers: lines, all but those that every answer of the connection has.
        body: the bytes; none where they are sent from `reader`.
        reader: of the blob; who sends the answer closes it.
        span: which bytes of the blob, from the first to the end (exclusive).
    """

    status: int
    headers: bytes
    body: bytes | bytearray = b""
    reader: BlobReader | None = None
    span: tuple[int, int] = (0, 0)


class FastPath:
    """The fast path of one server."""

    def __init__(self, context: Callable[[], ProcessContext]) -> None:
        self._context = context
        self._new_id = request_ids()

    def read(
        self,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        scheme: str,
        is_owner: bool,
    ) -> FastRequest | None:
        """A request, or None when it is the application's."""
        if method not in (b"GET", b"HEAD") or (found := _found(target)) is None:
            return None
        path, key = found
        context = self._context()
        reads = context.accounting.reads
        fields = dict(headers)
        if len(fields) != len(headers) or not fields.keys() <= _KNOWN or not _is_plain(fields):
            reads["headers"] += 1
            return None
        asked = _asked(fields)
        if takes_link(context.settings, asked):
            reads["redirect"] += 1
            return None
        principal = _principal(context, fields, is_owner=is_owner)
        policy = context.policies.now_of(key.namespace)
        if principal is None or policy is None or not _may_read(principal, key.namespace, policy):
            reads["caller"] += 1
            return None
        refusal = None
        try:
            context.policies.admit(key.namespace, policy)
        except ServerError as error:
            refusal = error
        own_id = self._new_id()
        request_id = callers_request_id(headers) if _ID in fields else None
        reads["fast"] += 1
        return FastRequest(
            *(method, path, key, _job(fields.get(_JOB)), asked, policy),
            *(request_id or own_id, own_id, scheme, refusal),
        )

    def answer_now(self, request: FastRequest) -> Answer | None:
        """The answer, where it takes no waiting; None otherwise.

        Raises:
            ServerError: 503 when the blob store does not answer.
        """
        if request.refusal is not None:
            return self.refuse(request, request.refusal)
        artifacts = self._context().artifacts
        is_head = request.method == b"HEAD"
        read = None if is_head else artifacts.read_now(request.key)
        if read is not None:
            return self._small_hit(request, *read)
        opened = artifacts.open_now(request.key)
        if opened is None:
            return None
        row, file = opened
        if is_head:
            file.close_now()
            return self._describe(request, row)
        return self._hit(request, row, file)

    async def answer(self, request: FastRequest) -> Answer:
        """The answer, after whatever it takes.

        Raises:
            Exception: what the application does not expect either.
        """
        artifacts = self._context().artifacts
        try:
            if request.method == b"HEAD":
                row = await artifacts.find(request.key)
                if row is not None:
                    return self._describe(request, row)
            else:
                artifact = await artifacts.open(request.key)
                if artifact is not None:
                    return self._hit(request, artifact.row, artifact.reader)
                self._context().accounting.count_miss(request.key, job=request.job)
        except ServerError as error:
            return self.refuse(request, error)
        return self.refuse(request, absent(request.key))

    def refuse(self, request: FastRequest, error: ServerError) -> Answer:
        """The answer to a request that is refused; counts it."""
        self._context().accounting.count_refusal(error.code)
        state = request.state
        log_refusal(error, method=request.method.decode(), path=request.path, state=state)
        return self._problem(request, refusal_response(state["request_id"], error))

    def fail(self, request: FastRequest, error: ServerError) -> Answer:
        """The answer to a request that the server itself could not finish."""
        return self._problem(request, problem_response(request.request_id.decode(), error))

    def count_answer(self, request: FastRequest, status: int) -> None:
        """Counts an answer, whatever it is."""
        self._context().accounting.counters.count_request(request.method, status)

    def count_sent(self, request: FastRequest, sent_bytes: int) -> None:
        """Counts the bytes of an answer that were sent from its `reader`."""
        accounting = self._context().accounting
        accounting.count_served(request.key, sent_bytes=sent_bytes, job=request.job)

    def _small_hit(self, request: FastRequest, row: StoredArtifact, blob: bytearray) -> Answer:
        """The answer to a GET of an artifact that was read already."""
        try:
            made, lines = self._represent(request, row, None)
        except ServerError as error:
            return self.refuse(request, error)
        self._count(request, row, made, sent_bytes=_length(made))
        start, stop = made.span or (0, 0)
        if stop - start != len(blob):
            blob = blob[start:stop]
        return Answer(made.status, lines + _frame(request), blob)

    def _hit(self, request: FastRequest, row: StoredArtifact, reader: BlobReader) -> Answer:
        """The answer to a GET; takes over the reader."""
        try:
            made, lines = self._represent(request, row, reader)
        except ServerError as error:
            return self.refuse(request, error)._replace(reader=_closed(reader))
        headers = lines + _frame(request)
        if made.span is None:  # if there are bytes, the proxy in front sends them
            self._count(request, row, made, sent_bytes=_length(made))
            return Answer(made.status, headers, reader=_closed(reader))
        if isinstance(reader, FileReader) and _length(made) <= SMALL_BYTES:
            body = reader.read_now(*made.span)
            if body is not None:
                reader.close_now()
                self._count(request, row, made, sent_bytes=len(body))
                return Answer(made.status, headers, body)
        self._count(request, row, made, sent_bytes=0)  # but see `count_sent`
        return Answer(made.status, headers, b"", reader, made.span)

    def _represent(
        self, request: FastRequest, row: StoredArtifact, reader: BlobReader | None
    ) -> tuple[Representation, bytes]:
        """The answer to a GET, and the lines of its headers."""
        asked, policy = request.asked, request.policy
        if not asked or (asked.keys() == _ACCEL and row.digest.size_bytes < MIN_ACCELERATED_BYTES):
            return _whole(row, changing=changes(policy))
        settings = self._context().settings
        made = representation_of(row, asked, policy, file=reader, settings=settings)
        return made, _lines(made.headers)

    def _count(
        self, request: FastRequest, row: StoredArtifact, made: Representation, *, sent_bytes: int
    ) -> None:
        self._context().accounting.count_answer(
            request.key,
            made.served,
            saved_seconds=row.compile_seconds,
            job=request.job,
            sent_bytes=sent_bytes,
        )

    def _describe(self, request: FastRequest, row: StoredArtifact) -> Answer:
        """The answer to a HEAD."""
        if request.asked:
            status, headers = description_of(row, request.asked, changing=changes(request.policy))
            return Answer(status, _lines(headers) + _frame(request))
        return Answer(200, _description(row, changing=changes(request.policy)) + _frame(request))

    def _problem(self, request: FastRequest, made: Response) -> Answer:
        headers = b"".join(b"%b: %b\r\n" % header for header in made.raw_headers)
        body = b"" if request.method == b"HEAD" else bytes(made.body)
        return Answer(made.status_code, headers + _frame(request), body)


@lru_cache(_MAX_KEPT)
def _job(header: bytes | None) -> str:
    return job_named(None if header is None else header.decode("latin-1"))


@lru_cache(_MAX_KEPT)
def _found(target: bytes) -> tuple[str, StoredKey] | None:
    """The path of an artifact and its key; None for any other request target."""
    path = _TARGET.fullmatch(target)
    if path is None:
        return None
    namespace, kind, device_type, fingerprint = (word.decode() for word in path.groups())
    key = StoredKey(
        Namespace(namespace),
        ArtifactKind(kind),
        DeviceType(device_type),
        Fingerprint(fingerprint),
    )
    return target.decode(), key


@lru_cache(_MAX_KEPT)
def _whole(row: StoredArtifact, *, changing: bool) -> tuple[Representation, bytes]:
    """The answer with a whole artifact, and the lines of its headers."""
    made = whole_of(row, changing=changing)
    return made, _lines(made.headers)


@lru_cache(_MAX_KEPT)
def _description(row: StoredArtifact, *, changing: bool) -> bytes:
    """The lines of the answer to a HEAD without conditions."""
    return _lines(description_of(row, _NOTHING, changing=changing)[1])


def _length(made: Representation) -> int:
    """How many bytes are served, by whomever."""
    start, stop = made.served or (0, 0)
    return stop - start


def _is_plain(fields: Mapping[bytes, bytes]) -> bool:
    """Whether the application would take these headers, too, and as they are."""
    return (
        b"host" in fields
        and fields.get(_PROTOCOL, _SPOKEN) == _SPOKEN
        and fields.get(b"connection", b"close").lower() in (b"close", b"keep-alive")
        and sum(map(len, fields)) + sum(map(len, fields.values())) <= MAX_HEADER_BYTES
    )


def _asked(fields: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """The headers that change the answer."""
    if fields.keys().isdisjoint(_READ_HERE):
        return _NOTHING
    return {
        name: fields[raw].decode("latin-1") for raw, name in _READ_HERE.items() if raw in fields
    }


def _principal(
    context: ProcessContext, fields: Mapping[bytes, bytes], *, is_owner: bool
) -> Principal | None:
    """The caller, see `api.calls`; None when they are refused, or have to be looked up."""
    if context.access.is_open:
        return OPEN_ACCESS
    shown = fields.get(b"authorization")
    if shown is None and is_owner:
        return OWNER
    return context.access.principal_now(None if shown is None else shown.decode("latin-1"))


def _may_read(principal: Principal, namespace: Namespace, policy: NamespacePolicy) -> bool:
    return principal is OPEN_ACCESS or principal.may_read(namespace, policy)


def _lines(headers: Mapping[str, str]) -> bytes:
    text = "".join(f"{name}: {value}\r\n" for name, value in _lowered(headers))
    return text.encode("latin-1")


def _lowered(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((name.lower(), value) for name, value in headers.items())


def _frame(request: FastRequest) -> bytes:
    before, after = _frame_around(request.scheme)
    return b"%b%b%b" % (before, request.request_id, after)


@lru_cache
def _frame_around(scheme: str) -> tuple[bytes, bytes]:
    """What every answer has before and after the request's id."""
    mark = b"<id>"
    lines = b"".join(b"%b: %b\r\n" % each for each in frame_headers(scheme, mark))
    before, _, after = lines.partition(mark)
    return before, after


def _closed(reader: BlobReader) -> BlobReader | None:
    """The reader, unless it could be closed at once."""
    if isinstance(reader, FileReader):
        reader.close_now()
        return None
    return reader
