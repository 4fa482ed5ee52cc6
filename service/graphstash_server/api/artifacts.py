"""GET, HEAD, PUT and DELETE of an artifact, and the look-up of many."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    ErrorCode,
    LookupRequest,
    LookupResponse,
    Scope,
    VerifyResponse,
)
from graphstash_schema.names import ListPosition
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_ACCEPT_REDIRECT,
    HEADER_COPY,
    HEADER_JOB,
    HEADER_METADATA,
    HEADER_WITHDRAWALS,
    MAX_LOOKUP_KEYS,
)
from graphstash_server.api.bodies import body_chunks, read_keys, read_model
from graphstash_server.api.calls import (
    BYTES,
    KEY,
    KEY_ERRORS,
    Calls,
    NamespaceCall,
    in_namespace,
    json_answer,
    key_of,
)
from graphstash_server.api.publishers import check_publisher, publisher_of
from graphstash_server.artifact import FoundArtifact
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.reading.conditions import job_of
from graphstash_server.reading.headers import unrecognized_headers
from graphstash_server.reading.reads import ReadAnswer, ReadRequest, Reads, Unanswered
from graphstash_server.reading.representation import absent, may_replace
from graphstash_server.services.artifacts.uploads import Upload, WithdrawnMeanwhileError
from graphstash_server.services.identity.principals import Principal

__all__ = ["ROUTE", "router"]

router = Calls(prefix=API_PREFIX, tags=["artifacts"])

_PATH: Final = "/{namespace}/artifacts/" + KEY

ROUTE: Final = API_PREFIX + _PATH


def _hidden(request: Request) -> ServerError:
    """Return the error for callers without read access, as if the artifact did not exist."""
    return absent(key_of(request))


@router.call(
    "GET",
    _PATH,
    needs=in_namespace(Scope.READ, absent=_hidden),
    answers={
        200: {"description": "the whole blob", **BYTES},
        206: {"description": "the range that was asked for", **BYTES},
        304: {"description": "the caller has it: If-None-Match names its ETag"},
        307: {"description": f"the blob lies at Location; only with {HEADER_ACCEPT_REDIRECT}: 1"},
    },
    refuses=[ErrorCode.RANGE_NOT_SATISFIABLE],
)
async def get_artifact(call: NamespaceCall) -> Response:
    """Serve an artifact. Changes only usage counters: hits or misses, and bytes. Copies
    (`Graphstash-Copy: 1`) count only bytes.
    """
    return await _read(call, is_head=False)


@router.call(
    "HEAD",
    _PATH,
    needs=in_namespace(Scope.READ, absent=_hidden),
    answers={
        200: {"description": "the headers of a GET, and how often it was served"},
        304: {"description": "the caller has it: If-None-Match names its ETag"},
    },
)
async def head_artifact(call: NamespaceCall) -> Response:
    """Describe an artifact. Counts neither as a hit nor as a miss."""
    return await _read(call, is_head=True)


async def _read(call: NamespaceCall, *, is_head: bool) -> Response:
    headers = call.request.headers
    unrecognized = unrecognized_headers(name for name, _ in headers.raw)
    call.context.accounting.counters.count_unrecognized_headers(unrecognized)
    request = ReadRequest(
        key_of(call.request),
        is_head,
        headers,
        call.policy,
        job_of(headers.get(HEADER_JOB)),
        headers.get(HEADER_COPY) == "1",
    )
    reads = Reads(call.context)
    answer = await reads.answer(request)
    if answer is Unanswered.ABSENT:
        raise absent(request.key)
    made, body, reader = answer
    if reader is not None:
        return _BlobResponse(answer, sent=partial(reads.count_sent, request))
    return Response(bytes(body), status_code=made.status, headers=made.headers)


class _BlobResponse(StreamingResponse):
    """Sends an open blob in chunks and closes its reader, also if the caller hangs up.

    If the stored blob is too short, `ShortBlobError` makes the HTTP server close the connection.
    The caller detects missing bytes by Content-Length.
    """

    def __init__(self, answer: ReadAnswer, *, sent: Callable[[int], None]) -> None:
        """After sending, call `sent` with the number of bytes."""
        made, _, reader = answer
        assert reader is not None  # noqa: S101 - other answers need no `_BlobResponse`
        super().__init__(self._chunks(*(made.span or (0, 0))), made.status, made.headers)
        self._reader = reader
        self._sent = sent
        self._sent_bytes = 0

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reader.close()
            self._sent(self._sent_bytes)

    async def _chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        async for chunk in self._reader.chunks(start, stop):
            yield chunk
            self._sent_bytes += len(chunk)


@router.call(
    "PUT",
    _PATH,
    needs=in_namespace(Scope.WRITE, absent=_hidden),
    takes_bytes=True,
    answers={
        200: {"description": "the same bytes were there already"},
        201: {"description": "stored, durably, in place of others where the policy allows it"},
    },
    refuses=[
        ErrorCode.PUBLISHER_REFUSED,
        ErrorCode.DIGEST_REQUIRED,
        ErrorCode.INVALID_DIGEST,
        ErrorCode.INVALID_METADATA,
        ErrorCode.DIGEST_MISMATCH,
        ErrorCode.READ_ONLY,
        ErrorCode.CONFLICT,
        ErrorCode.WITHHELD,
        ErrorCode.LENGTH_REQUIRED,
        ErrorCode.PRECONDITION_FAILED,
        ErrorCode.HEADERS_TOO_LARGE,
        ErrorCode.INSUFFICIENT_STORAGE,
    ],
)
async def put_artifact(call: NamespaceCall) -> Response:
    """Store an artifact. Path, headers and policy are checked before the body is read. With
    `Graphstash-Withdrawals`, a position in the namespace's list of withdrawals, bytes that the
    server withdrew after that position are refused (412).
    """
    request = call.request
    key = key_of(request)
    size_bytes = _announced_size(request)
    call.context.uploads.check(key.namespace, size_bytes, policy=call.policy)
    await check_publisher(call)
    header = request.headers.get(HEADER_METADATA, "")
    metadata = ArtifactMetadata.from_header(header) if header else None
    applied = request.headers.get(HEADER_WITHDRAWALS)
    upload = Upload(
        key=key,
        digest=_announced_digest(request, size_bytes),
        metadata_header=header,
        compile_seconds=metadata.compile_seconds if metadata else 0.0,
        toolchain=metadata.toolchain if metadata else "",
        only_if_absent=request.headers.get("if-none-match", "").strip() == "*",
        actor=call.actor,
        policy=call.policy,
        job=job_of(request.headers.get(HEADER_JOB)),
        publisher=publisher_of(call) if call.context.region is not None else None,
        withdrawn_until=ListPosition(applied).number if applied is not None else None,
    )
    if call.context.region is not None:
        await call.context.region.publishes.admit(upload)
    try:
        is_new = await call.context.uploads.publish(upload, _body(call, upload))
    except WithdrawnMeanwhileError:
        raise ServerError(
            ErrorCode.PRECONDITION_FAILED,
            f"{key.key} with the digest {upload.digest} was withdrawn after {applied}: apply the "
            "withdrawals, then retry",
        ) from None
    if call.context.region is not None:
        call.context.region.publishes.wake()
    headers = {
        "Location": key.artifact_path,
        "ETag": upload.digest.etag,
        "Repr-Digest": upload.digest.repr_digest,
    }
    if not is_new and "expect" in request.headers:
        headers["Connection"] = "close"  # the client may still send the body, or not
    return Response(status_code=201 if is_new else 200, headers=headers)


@router.call(
    "DELETE",
    _PATH,
    needs=in_namespace(Scope.ADMIN, absent=_hidden),
    answers={204: {"description": "gone"}},
)
async def delete_artifact(call: NamespaceCall) -> Response:
    """Delete an artifact. Downloads in progress receive all bytes. No server serves the artifact
    after the answer, which takes up to 2.5 s for that, with an object store always.
    """
    key = key_of(call.request)
    call.context.ownership.require()
    if not await call.context.artifacts.delete(key, actor=call.actor):
        raise absent(key)
    return Response(status_code=204)


@router.call(
    "POST",
    "/{namespace}/artifacts:lookup",
    needs=in_namespace(Scope.READ, counts=lambda *call: not _is_comparison(*call)),
    body=LookupRequest,
    answers={200: {"model": LookupResponse}},
    refuses=[ErrorCode.TOO_MANY_KEYS],
)
async def lookup_artifacts(call: NamespaceCall) -> Response:
    """Return which of many artifacts exist. Protects them from eviction for ten minutes, up to a
    limit per caller and per namespace, unless an upload needs their space. A region that compares
    its copies (`Graphstash-Copy: 1`) protects none, and has a rate of its own.
    """
    is_comparison = _is_comparison(call.request, call.principal)
    if is_comparison:
        call.context.policies.admit_comparison(call.namespace, call.policy)
    keys = await read_keys(
        call,
        LookupRequest,
        max_keys=MAX_LOOKUP_KEYS,
        advice=f"the limit is {MAX_LOOKUP_KEYS} in one lookup: split the request",
    )
    keys = list(dict.fromkeys(keys))
    caller = None if is_comparison else call.principal.party
    found = await call.context.artifacts.lookup(call.namespace, keys, caller=caller)
    if call.context.region is not None:
        await call.context.region.fetches.look_up(call.namespace, keys, found)
    stored = [_info(key, found.artifacts[key]) for key in keys if key in found.artifacts]
    missing = [key.json for key in keys if key not in found.artifacts]
    withdrawn = [_info(key, each) for key, each in found.withheld.items()]
    # Build a LookupResponse as text: a model per key would cost ten times as much.
    reply = (
        f'{{"found":[{",".join(stored)}],"missing":[{",".join(missing)}],'
        f'"withdrawn":[{",".join(withdrawn)}],'
        f'"newest_withdrawal":"{found.newest_withdrawal}"}}'
    )
    return Response(reply, media_type="application/json")


def _is_comparison(request: Request, principal: Principal) -> bool:
    """Return whether a region compares its copies. A region's token may read every namespace."""
    return principal.may_see_totals and request.headers.get(HEADER_COPY) == "1"


def _info(key: StoredKey, found: FoundArtifact) -> str:
    return (
        f'{{"key":{key.json},"digest":"sha256:{found.sha256}",'
        f'"size_bytes":{found.size_bytes},"compile_seconds":{found.compile_seconds}}}'
    )


@router.call(
    "POST",
    "/{namespace}/artifacts:verify",
    needs=in_namespace(Scope.READ),
    body=ArtifactKey,
    answers={200: {"model": VerifyResponse}},
    refuses=KEY_ERRORS,
)
async def verify_artifact(call: NamespaceCall) -> Response:
    """Compare an artifact's blob with its digest, and drop the artifact if it is lost or damaged.
    For clients that received wrong bytes, which the network may also have damaged.
    """
    key = await read_model(call, ArtifactKey)
    reply = await call.context.artifacts.verify(StoredKey.of(call.namespace, key))
    return json_answer(reply)


async def _body(call: NamespaceCall, upload: Upload) -> AsyncIterator[bytes]:
    """Yield the body. It may take hours, so check the caller and the policy again at its end.

    Raises:
        ServerError: as `body_chunks` and `Call.reauthorize`. 403, 413 or 503 if the policy no
            longer allows the upload.
    """
    context = call.context
    idle_seconds = context.settings.upload_idle_seconds
    async for chunk in body_chunks(call.request, idle_seconds=idle_seconds):
        yield chunk
    await call.reauthorize()
    namespace = upload.key.namespace
    context.uploads.check(namespace, upload.digest.size_bytes, policy=call.policy)
    if upload.replaces and not may_replace(call.policy):
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"the namespace {namespace} became write-once during the upload: nothing was stored, "
            "retry",
        )


def _announced_size(request: Request) -> int:
    """Return Content-Length, which the HTTP parser has checked."""
    length = request.headers.get("content-length")
    if length is None:
        raise ServerError(
            ErrorCode.LENGTH_REQUIRED,
            "Content-Length is missing: space is reserved before the body is read, so send the "
            "size instead of a chunked body",
        )
    return int(length)


def _announced_digest(request: Request, size_bytes: int) -> Digest:
    text = request.headers.get("repr-digest")
    if text is None:
        raise ServerError(
            ErrorCode.DIGEST_REQUIRED,
            "Repr-Digest is missing: send the SHA-256 of the body (RFC 9530)",
        )
    return Digest.parse_repr_digest(text, size_bytes=size_bytes)
