"""FastPath: reads a request for an artifact and makes its answer."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.responses import Response

from graphstash_schema import (
    STATUS,
    ArtifactKind,
    DeviceType,
    ErrorCode,
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
from graphstash_server.api.problems import (
    are_refusals_logged,
    log_refusal,
    problem_response,
    refusal_response,
)
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

_LINE: Final = re.compile(
    rf"(GET|HEAD) (/v1/{Namespace.form.pattern}/artifacts/(?:{'|'.join(ArtifactKind)})"
    rf"/{DeviceType.form.pattern}/{Fingerprint.form.pattern}) HTTP/1\.1\r\n".encode()
)
"""A request line."""

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

_MAX_KEPT_BYTES: Final = 2048
"""Longer headers are read anew each time: 1,024 of them are kept."""


class FastRequest(NamedTuple):
    """A request that its caller may make, and that counts against the namespace's rate."""

    method: str
    path: str
    key: StoredKey
    job: str
    asked: Mapping[str, str]
    keep_alive: bool
    policy: NamespacePolicy
    request_id: bytes
    own_id: bytes
    scheme: str
    refusal: ServerError | None

    @property
    def state(self) -> Mapping[str, str]:
        """Its ids, where `api.frame` keeps them for the log."""
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

    def read(self, head: bytes, *, scheme: str, is_owner: bool) -> FastRequest | None:
        """A request, or None when it is the application's.

        Args:
            head: what has come of it: its line and headers, and the empty line after them.
            scheme: "http" or "https".
            is_owner: whether it came by the owner's own socket.
        """
        line = _LINE.match(head)
        if line is None:
            return None
        context = self._context()
        reads = context.accounting.reads
        rest = head[line.end() :]
        fields = _fields(rest) if len(rest) <= _MAX_KEPT_BYTES else _fields_of(rest)
        if fields is None:
            reads["headers"] += 1
            return None
        if takes_link(context.settings, fields.asked):
            reads["redirect"] += 1
            return None
        method, path = line[1].decode(), line[2].decode()
        place, _, fingerprint = path.rpartition("/")
        key = StoredKey(*_place(place), Fingerprint(fingerprint))
        principal = _principal(context, fields.shown, is_owner=is_owner)
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
        reads["fast"] += 1
        return FastRequest(
            method,
            path,
            key,
            fields.job,
            fields.asked,
            fields.keep_alive,
            policy,
            fields.request_id or own_id,
            own_id,
            scheme,
            refusal,
        )

    def answer_now(self, request: FastRequest) -> Answer | None:
        """The answer, where it takes no waiting; None otherwise.

        Raises:
            ServerError: 503 when the blob store does not answer.
        """
        if request.refusal is not None:
            return self.refuse(request, request.refusal)
        artifacts = self._context().artifacts
        found = artifacts.find_now(request.key)
        if not found:
            return None if found is None else self._miss(request)
        (row,) = found
        is_head = request.method == "HEAD"
        if not is_head and (blob := artifacts.read_now(row)) is not None:
            return self._small_hit(request, row, blob)
        file = artifacts.open_now(row)
        if file is None:
            return None
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
            if request.method == "HEAD":
                row = await artifacts.find(request.key)
                if row is not None:
                    return self._describe(request, row)
            else:
                artifact = await artifacts.open(request.key)
                if artifact is not None:
                    return self._hit(request, artifact.row, artifact.reader)
        except ServerError as error:
            return self.refuse(request, error)
        return self._miss(request)

    def refuse(self, request: FastRequest, error: ServerError) -> Answer:
        """The answer to a request that is refused; counts it."""
        self._context().accounting.count_refusal(error.code)
        log_refusal(error, method=request.method, path=request.path, state=request.state)
        return self._problem(request, refusal_response(request.request_id.decode(), error))

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

    def _miss(self, request: FastRequest) -> Answer:
        """The answer where there is no artifact; counts it."""
        accounting = self._context().accounting
        if request.method == "GET":
            accounting.count_miss(request.key, job=request.job)
        if are_refusals_logged():
            return self.refuse(request, absent(request.key))
        accounting.count_refusal(ErrorCode.NOT_FOUND)
        return _absence(*request.key[:3]).answer(request)

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
        body = b"" if request.method == "HEAD" else bytes(made.body)
        return Answer(made.status_code, headers + _frame(request), body)


@lru_cache(_MAX_KEPT)
def _place(path: str) -> tuple[Namespace, ArtifactKind, DeviceType]:
    """What a path says before the fingerprint: the same for a whole job."""
    _, _, namespace, _, kind, device_type = path.split("/")
    return Namespace(namespace), ArtifactKind(kind), DeviceType(device_type)


class _Fields(NamedTuple):
    """What headers say: those that change the answer, who asks (`Authorization`), their own id of
    the request, the job that they are of, and whether there may be another one.
    """

    asked: Mapping[str, str]
    shown: str | None
    request_id: bytes | None
    job: str
    keep_alive: bool


class _Headers(list[tuple[bytes, bytes]]):
    """Takes headers from the parser, with their names as the application gets them."""

    heads = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads += 1


def _fields_of(lines: bytes) -> _Fields | None:
    """Headers that are read completely here; None when anything about them is the application's.
    The parser is that of every other request.
    """
    headers = _Headers()
    try:
        HttpRequestParser(headers).feed_data(b"GET / HTTP/1.1\r\n" + lines)
    except (HttpParserError, HttpParserUpgrade):
        return None
    fields = dict(headers)
    if headers.heads != 1 or len(fields) != len(headers):  # or who asks might mean two requests
        return None
    if not fields.keys() <= _KNOWN or not _is_plain(fields):
        return None
    shown = fields.get(b"authorization")
    return _Fields(
        _asked(fields),
        None if shown is None else shown.decode("latin-1"),
        callers_request_id(headers),
        job_named(fields[_JOB].decode("latin-1") if _JOB in fields else None),
        fields.get(b"connection", b"").lower() != b"close",
    )


_fields: Final = lru_cache(_MAX_KEPT)(_fields_of)


class _Absence(NamedTuple):
    """The answer for an artifact that does not exist, but for what differs between those of a job.

    Attributes:
        headers: the lines before and after `Content-Length`.
        body: what stands before, between and after the fingerprint and the request's id.
    """

    headers: tuple[bytes, bytes]
    body: tuple[bytes, bytes, bytes]

    def answer(self, request: FastRequest) -> Answer:
        """The answer to one request."""
        begin, between, end = self.body
        fingerprint = request.key.fingerprint.encode()
        body = b"".join((begin, fingerprint, between, request.request_id, end))
        before, after = self.headers
        lines = b"%bcontent-length: %d\r\n%b" % (before, len(body), after)
        return Answer(
            STATUS[ErrorCode.NOT_FOUND],
            lines + _frame(request),
            b"" if request.method == "HEAD" else body,
        )


@lru_cache(_MAX_KEPT)
def _absence(namespace: Namespace, kind: ArtifactKind, device_type: DeviceType) -> _Absence:
    """Made from the problem document with marks where no word has such characters."""
    key = StoredKey(namespace, kind, device_type, cast("Fingerprint", "<fingerprint>"))
    made = refusal_response("<id>", absent(key))
    begin, _, rest = bytes(made.body).partition(b"<fingerprint>")
    between, _, end = rest.partition(b"<id>")
    lines = b"".join(b"%b: %b\r\n" % header for header in made.raw_headers)
    before, _, after = lines.partition(b"content-length: %d\r\n" % len(made.body))
    return _Absence((before, after), (begin, between, end))


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


def _principal(context: ProcessContext, shown: str | None, *, is_owner: bool) -> Principal | None:
    """The caller, see `api.calls`; None when they are refused, or have to be looked up."""
    if context.access.is_open:
        return OPEN_ACCESS
    if shown is None and is_owner:
        return OWNER
    return context.access.principal_now(shown)


def _may_read(principal: Principal, namespace: Namespace, policy: NamespacePolicy) -> bool:
    return principal is OPEN_ACCESS or principal.may_read(namespace, policy)


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name.lower()}: {value}\r\n" for name, value in headers.items()]
    return "".join(lines).encode("latin-1")


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
