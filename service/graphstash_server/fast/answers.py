"""FastPath: parses requests for artifacts, and builds their responses without the application."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
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
from graphstash_schema.protocol import HEADER_COPY, HEADER_JOB
from graphstash_server.api.frame import (
    ID_NAME,
    MAX_HEADER_BYTES,
    PROTOCOL,
    PROTOCOL_NAME,
    REQUEST_ID,
    callers_request_id,
    frame_headers,
    header_lines,
    request_ids,
)
from graphstash_server.api.problems import (
    are_refusals_logged,
    log_refusal,
    problem_response,
)
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.reading.conditions import job_of
from graphstash_server.reading.headers import CONDITIONAL, READ, relevant_name
from graphstash_server.reading.reads import ReadAnswer, ReadRequest, Reads, Unanswered
from graphstash_server.reading.representation import absent, may_redirect
from graphstash_server.services.artifacts.service import MAX_ROWS
from graphstash_server.services.identity.principals import OPEN_ACCESS, OWNER, Principal
from graphstash_server.storage import BlobReader

__all__ = ["Answer", "FastPath", "FastRequest"]

_LINE: Final = re.compile(
    rf"(GET|HEAD) (/v1/{Namespace.form.pattern}/artifacts/(?:{'|'.join(ArtifactKind)})"
    rf"/{DeviceType.form.pattern}/{Fingerprint.form.pattern}) HTTP/1\.1\r\n".encode()
)
"""The request line of an artifact read."""

_IDS: Final = re.compile(
    rb"\r\n(?:(%b):[ \t]*(%b)|(?:cf-ray|x-amzn-trace-id|x-correlation-id):[ \t]*[!-~]{1,128})"
    rb"(?=\r\n[^ \t])" % (ID_NAME, REQUEST_ID.pattern),
    re.IGNORECASE,
)
"""A header with the ID that a proxy gives each request, if its value is well-formed."""

_JOB: Final = HEADER_JOB.lower().encode()
_COPY: Final = HEADER_COPY.lower().encode()

_MAX_KEPT_BYTES: Final = 2048
"""Maximum size of cached headers, which bounds the memory of the caches. The server parses longer
header blocks for each request."""


class FastRequest(NamedTuple):
    """An authorized request, counted against the namespace's rate."""

    method: str
    path: str
    read: ReadRequest
    keep_alive: bool
    request_id: bytes
    own_id: bytes
    scheme: str
    refusal: ServerError | None

    @property
    def state(self) -> Mapping[str, str]:
        """The request's IDs, in the form that `api.frame` uses for the log."""
        return {
            "request_id": self.request_id.decode(),
            "server_request_id": self.own_id.decode(),
        }


class Answer(NamedTuple):
    """The response to send. `headers` omits the lines common to all responses of the connection.

    If `reader` is given, the body consists of its bytes from `span[0]` (inclusive) to `span[1]`
    (exclusive), and the sender closes the reader.
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
        """Parse a request, or return None to leave it to the application.

        Args:
            head: request line, headers, and the empty line after them.
            scheme: "http" or "https".
            is_owner: whether the request came over the owner's socket.
        """
        line = _LINE.match(head)
        if line is None:
            return None
        context = self._context()
        reads = context.accounting.reads
        rest = head[line.end() - len(b"\r\n") :]
        if len(rest) <= _MAX_KEPT_BYTES:
            rest, request_id = _without_ids(rest)
            fields = _fields(rest)
        else:
            fields, request_id = _fields_of(rest), None
        if fields is None:
            reads["headers"] += 1
            return None
        meaning = fields.meaning
        if may_redirect(context.settings, meaning.conditions):
            reads["redirect"] += 1
            return None
        method, path = line[1].decode(), line[2].decode()
        place, _, fingerprint = path.rpartition("/")
        key = StoredKey(*_place(place), Fingerprint(fingerprint))
        principal = _principal(context, fields.authorization, is_owner=is_owner)
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
            ReadRequest(
                key, method == "HEAD", meaning.conditions, policy, meaning.job, meaning.is_copy
            ),
            meaning.keep_alive,
            request_id or fields.request_id or own_id,
            own_id,
            scheme,
            refusal,
        )

    def answer_now(self, request: FastRequest) -> Answer | None:
        """Return the answer, or None if `answer` is needed because the call would block."""
        if request.refusal is not None:
            return self.refuse(request, request.refusal)
        try:
            answer = Reads(self._context()).answer_now(request.read)
        except ServerError as error:
            return self.refuse(request, error)
        return None if answer is Unanswered.BLOCKED else self._rendered(request, answer)

    async def answer(self, request: FastRequest) -> Answer:
        """Return the answer. A `ServerError` becomes a refusal."""
        try:
            return self._rendered(request, await Reads(self._context()).answer(request.read))
        except ServerError as error:
            return self.refuse(request, error)

    def refuse(self, request: FastRequest, error: ServerError) -> Answer:
        """Build and count the response to a refused request."""
        self._context().accounting.count_refusal(error.code)
        log_refusal(error, method=request.method, path=request.path, state=request.state)
        return self._problem(request, problem_response(request.request_id.decode(), error))

    def fail(self, request: FastRequest, error: ServerError) -> Answer:
        """Build the response to a request that failed with an internal error."""
        return self._problem(request, problem_response(request.request_id.decode(), error))

    def count_answer(self, request: FastRequest, status: int) -> None:
        """Count a response of any status."""
        self._context().accounting.counters.count_request(request.method, status)

    def count_sent(self, request: FastRequest, sent_bytes: int) -> None:
        """Count the bytes of an answer that were sent from its `reader`."""
        Reads(self._context()).count_sent(request.read, sent_bytes)

    def _rendered(self, request: FastRequest, answer: ReadAnswer | Unanswered) -> Answer:
        if isinstance(answer, Unanswered):
            return self._absence(request)
        made, body, reader = answer
        return Answer(made.status, made.lines + _frame(request), body, reader, made.span or (0, 0))

    def _absence(self, request: FastRequest) -> Answer:
        key = request.read.key
        if are_refusals_logged():
            return self.refuse(request, absent(key))
        self._context().accounting.count_refusal(ErrorCode.NOT_FOUND)
        return _absence(*key[:3]).answer(request)

    def _problem(self, request: FastRequest, made: Response) -> Answer:
        headers = header_lines(made.raw_headers)
        body = b"" if request.method == "HEAD" else bytes(made.body)
        return Answer(made.status_code, headers + _frame(request), body)


@lru_cache(MAX_ROWS)
def _place(path: str) -> tuple[Namespace, ArtifactKind, DeviceType]:
    """Parse a path up to the fingerprint. A whole job uses the same few values."""
    _, _, namespace, _, kind, device_type = path.split("/")
    return Namespace(namespace), ArtifactKind(kind), DeviceType(device_type)


class _Meaning(NamedTuple):
    """The headers that a job's requests have in common. `conditions` change the response. `job` may
    be empty. For `is_copy`, see `ReadRequest`.
    """

    conditions: Mapping[str, str]
    job: str
    is_copy: bool
    keep_alive: bool


class _Fields(NamedTuple):
    """The parsed headers of a request."""

    meaning: _Meaning
    authorization: str | None
    request_id: bytes | None


class _Headers(list[tuple[bytes, bytes]]):
    """Collects from the parser the headers that a read does not ignore, with lower-case names as in
    the application.
    """

    heads = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        relevant = relevant_name(name)
        if relevant is not None:
            self.append((relevant, value))

    def on_headers_complete(self) -> None:
        self.heads += 1


def _without_ids(lines: bytes) -> tuple[bytes, bytes | None]:
    """Remove IDs, so that the server parses equal requests with different IDs once.

    Returns:
        The headers, and the caller's request ID. Its header stays without a value, so that the
        parser detects a repeated header.
    """
    text, *found = _IDS.split(lines)
    kept, request_id = [text], None
    for name, value, after in zip(found[::3], found[1::3], found[2::3], strict=True):
        if name is not None:
            kept.append(b"\r\n%b:" % name)
            request_id = value
        kept.append(after)
    return b"".join(kept), request_id


def _fields_of(lines: bytes) -> _Fields | None:
    """Parse headers, from the end of the request line on, with uvicorn's parser. Return None to
    leave the request to the application.
    """
    if len(lines) > MAX_HEADER_BYTES:
        return None
    headers = _Headers()
    try:
        HttpRequestParser(headers).feed_data(b"GET / HTTP/1.1" + lines)
    except (HttpParserError, HttpParserUpgrade):
        return None
    fields = dict(headers)
    if headers.heads != 1 or len(fields) != len(headers):  # two requests, or a repeated header
        return None
    # Each caller has another token, and a proxy may give each request an ID.
    authorization, request_id = fields.pop(b"authorization", None), fields.pop(ID_NAME, None)
    common = tuple(fields.items())
    is_small = len(lines) <= _MAX_KEPT_BYTES or sum(map(len, chain(*common))) <= _MAX_KEPT_BYTES
    meaning = _meaning(common) if is_small else _meaning_of(common)
    if meaning is None:
        return None
    return _Fields(
        meaning,
        None if authorization is None else authorization.decode("latin-1"),
        None if request_id is None else callers_request_id([(ID_NAME, request_id)]),
    )


_fields: Final = lru_cache(MAX_ROWS)(_fields_of)


class _Absence(NamedTuple):
    """A response for an absent artifact, without the parts that differ between requests of a job.

    Attributes:
        headers: lines before and after `Content-Length`.
        body: text before, between and after the fingerprint and the request ID.
    """

    headers: tuple[bytes, bytes]
    body: tuple[bytes, bytes, bytes]

    def answer(self, request: FastRequest) -> Answer:
        begin, between, end = self.body
        fingerprint = request.read.key.fingerprint.encode()
        body = b"".join((begin, fingerprint, between, request.request_id, end))
        before, after = self.headers
        lines = b"%bcontent-length: %d\r\n%b" % (before, len(body), after)
        return Answer(
            STATUS[ErrorCode.NOT_FOUND],
            lines + _frame(request),
            b"" if request.method == "HEAD" else body,
        )


@lru_cache(MAX_ROWS)
def _absence(namespace: Namespace, kind: ArtifactKind, device_type: DeviceType) -> _Absence:
    """Split a problem document at placeholders that no valid value can contain."""
    key = StoredKey(namespace, kind, device_type, cast("Fingerprint", "<fingerprint>"))
    made = problem_response("<id>", absent(key))
    begin, _, rest = bytes(made.body).partition(b"<fingerprint>")
    between, _, end = rest.partition(b"<id>")
    lines = header_lines(made.raw_headers)
    before, _, after = lines.partition(b"content-length: %d\r\n" % len(made.body))
    return _Absence((before, after), (begin, between, end))


def _meaning_of(headers: tuple[tuple[bytes, bytes], ...]) -> _Meaning | None:
    """Interpret headers. Return None if the application might not accept them unchanged."""
    fields = dict(headers)
    connection = fields.get(b"connection", b"keep-alive").lower()
    if (
        b"host" not in fields
        or not fields.keys() <= READ
        or fields.get(PROTOCOL_NAME, PROTOCOL) != PROTOCOL
        or connection not in {b"close", b"keep-alive"}
    ):
        return None
    return _Meaning(
        {name: fields[raw].decode("latin-1") for raw, name in CONDITIONAL.items() if raw in fields},
        job_of(fields[_JOB].decode("latin-1") if _JOB in fields else None),
        fields.get(_COPY) == b"1",
        connection == b"keep-alive",
    )


_meaning: Final = lru_cache(MAX_ROWS)(_meaning_of)


def _principal(
    context: ProcessContext, authorization: str | None, *, is_owner: bool
) -> Principal | None:
    """Return the caller (see `api.calls`), or None if it is refused or needs a query."""
    if context.access.is_open:
        return OPEN_ACCESS
    if authorization is None and is_owner:
        return OWNER
    return context.access.principal_now(authorization)


def _may_read(principal: Principal, namespace: Namespace, policy: NamespacePolicy) -> bool:
    return principal is OPEN_ACCESS or principal.may_read(namespace, policy)


def _frame(request: FastRequest) -> bytes:
    before, after = _frame_around(request.scheme)
    return b"%b%b%b" % (before, request.request_id, after)


@lru_cache
def _frame_around(scheme: str) -> tuple[bytes, bytes]:
    """Return the common header lines before and after the request ID."""
    placeholder = b"<id>"
    lines = header_lines(frame_headers(scheme, placeholder))
    before, _, after = lines.partition(placeholder)
    return before, after
