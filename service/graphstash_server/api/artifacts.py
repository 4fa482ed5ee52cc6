"""GET, HEAD, PUT and DELETE of an artifact, and the lookup of many."""

from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    ErrorCode,
    LookupRequest,
    LookupResponse,
    NamespacePolicy,
    Scope,
    VerifyResponse,
    WriteMode,
)
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_ACCEPT_REDIRECT,
    HEADER_HITS,
    HEADER_METADATA,
    MAX_LOOKUP_KEYS,
)
from graphstash_server.api.access import access_refusals, actor_of, authorized
from graphstash_server.api.blobs import BlobResponse, accelerated_path
from graphstash_server.api.bodies import body_chunks, check_key_count, json_body, read_model
from graphstash_server.api.conditions import lists_etag, requested_range
from graphstash_server.api.paths import (
    IN_KEY,
    IN_NAMESPACE,
    KEY,
    key_of,
    named_namespace,
    namespace_of,
)
from graphstash_server.api.redirects import redirect, takes_link
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts import StoredArtifact
from graphstash_server.services.commits import Upload

__all__ = ["router"]

router = APIRouter(prefix=API_PREFIX, tags=["artifacts"])

_PATH: Final = "/{namespace}/artifacts/" + KEY
_LOOKUP_PATH: Final = "/{namespace}/artifacts:lookup"
_VERIFY_PATH: Final = "/{namespace}/artifacts:verify"
_BAD_WORD: Final = (
    ErrorCode.INVALID_NAMESPACE,
    ErrorCode.INVALID_KIND,
    ErrorCode.INVALID_DEVICE_TYPE,
    ErrorCode.INVALID_FINGERPRINT,
    ErrorCode.UNSUPPORTED_PROTOCOL,
)
_BYTES: Final[dict[str, Any]] = {"content": {"application/octet-stream": {}}}


@router.get(
    _PATH,
    response_class=Response,
    responses={
        200: {"description": "the whole blob", **_BYTES},
        206: {"description": "the range that was asked for", **_BYTES},
        304: {"description": "the caller has it: If-None-Match names its ETag"},
        307: {"description": f"the blob lies at Location; only with {HEADER_ACCEPT_REDIRECT}: 1"},
        **access_refusals(*_BAD_WORD, ErrorCode.NOT_FOUND, ErrorCode.RANGE_NOT_SATISFIABLE),
    },
    openapi_extra={"parameters": IN_KEY},
)
async def get_artifact(request: Request) -> Response:
    """Serves an artifact. Changes nothing but the usage counters."""
    await authorized(request, named_namespace(request), Scope.READ, absent=_absent_there)
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    policy = await context.policies.of(key.namespace)
    if takes_link(request):
        linked = await context.artifacts.link(key)
        if linked is not None:
            return redirect(context, *linked, headers=_headers(linked[0], None, policy))
    artifact = await context.artifacts.open(key)
    if artifact is None:
        context.accounting.count_miss(key)
        raise _absent(key)
    row = artifact.row
    asked = request.headers
    try:
        if lists_etag(asked.get("if-none-match"), row.digest.etag):
            context.accounting.count_use(key)
            await artifact.reader.close()
            return Response(status_code=304, headers=_unchanged(row, policy))
        span = requested_range(
            asked.get("range"),
            asked.get("if-range"),
            etag=row.digest.etag,
            size_bytes=row.digest.size_bytes,
        )
    except BaseException:
        await artifact.reader.close()
        raise
    if span is None or span[0] == 0:
        context.accounting.count_hit(key, saved_seconds=row.compile_seconds)
    else:
        context.accounting.count_use(key)
    accelerated = None
    if not _changes(policy):  # the proxy says by itself how long its answers may be kept
        accelerated = accelerated_path(
            request, artifact.reader.path, blob_dir=context.settings.blob_dir, span=span
        )
    return BlobResponse(
        artifact,
        span=span,
        headers=_headers(row, span, policy),
        accelerated=accelerated,
        sent=lambda sent_bytes: context.accounting.count_served(key, sent_bytes=sent_bytes),
    )


@router.head(
    _PATH,
    response_class=Response,
    responses={
        200: {"description": "the headers of a GET, and how often it was served"},
        304: {"description": "the caller has it: If-None-Match names its ETag"},
        **access_refusals(*_BAD_WORD, ErrorCode.NOT_FOUND),
    },
    openapi_extra={"parameters": IN_KEY},
)
async def head_artifact(request: Request) -> Response:
    """Describes an artifact; counts neither as a hit nor as a miss."""
    await authorized(request, named_namespace(request), Scope.READ, absent=_absent_there)
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    policy = await context.policies.of(key.namespace)
    row = await context.artifacts.find(key)
    if row is None:
        raise _absent(key)
    if lists_etag(request.headers.get("if-none-match"), row.digest.etag):
        return Response(status_code=304, headers=_unchanged(row, policy))
    headers = _headers(row, None, policy)
    headers["Content-Length"] = str(row.digest.size_bytes)
    headers[HEADER_HITS] = str(row.hits)
    return Response(status_code=200, headers=headers)


@router.put(
    _PATH,
    response_class=Response,
    status_code=201,
    responses={
        200: {"description": "the same bytes were there already"},
        201: {"description": "stored, durably, in place of others where the policy allows it"},
        **access_refusals(
            *_BAD_WORD,
            ErrorCode.DIGEST_REQUIRED,
            ErrorCode.INVALID_DIGEST,
            ErrorCode.INVALID_METADATA,
            ErrorCode.DIGEST_MISMATCH,
            ErrorCode.LENGTH_MISMATCH,
            ErrorCode.UPLOAD_TIMEOUT,
            ErrorCode.READ_ONLY,
            ErrorCode.CONFLICT,
            ErrorCode.WITHHELD,
            ErrorCode.LENGTH_REQUIRED,
            ErrorCode.PRECONDITION_FAILED,
            ErrorCode.TOO_LARGE,
            ErrorCode.HEADERS_TOO_LARGE,
            ErrorCode.UNAVAILABLE,
            ErrorCode.INSUFFICIENT_STORAGE,
        ),
    },
    openapi_extra={"parameters": IN_KEY, "requestBody": {"required": True, **_BYTES}},
)
async def put_artifact(request: Request) -> Response:
    """Stores an artifact. Everything is checked before the body is read."""
    principal = await authorized(
        request, named_namespace(request), Scope.WRITE, absent=_absent_there
    )
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    size_bytes = _announced_size(request)
    policy = await context.policies.of(key.namespace)
    context.uploads.check(key.namespace, size_bytes, policy=policy)
    header = request.headers.get(HEADER_METADATA, "")
    metadata = ArtifactMetadata.from_header(header) if header else None
    upload = Upload(
        key=key,
        digest=_announced_digest(request, size_bytes),
        metadata_header=header,
        compile_seconds=metadata.compile_seconds if metadata else 0.0,
        toolchain=metadata.toolchain if metadata else "",
        only_if_absent=request.headers.get("if-none-match", "").strip() == "*",
        actor=actor_of(request, principal),
        policy=policy,
    )
    is_new = await context.uploads.publish(upload, _body(request, upload))
    headers = {
        "Location": key.artifact_path,
        "ETag": upload.digest.etag,
        "Repr-Digest": upload.digest.repr_digest,
    }
    if not is_new and "expect" in request.headers:
        headers["Connection"] = "close"  # the body was not asked for, and may or may not come
    return Response(status_code=201 if is_new else 200, headers=headers)


@router.delete(
    _PATH,
    response_class=Response,
    status_code=204,
    responses={
        204: {"description": "gone"},
        **access_refusals(*_BAD_WORD, ErrorCode.NOT_FOUND),
    },
    openapi_extra={"parameters": IN_KEY},
)
async def delete_artifact(request: Request) -> Response:
    """Removes an artifact; a job that is reading it gets its bytes to the end."""
    principal = await authorized(
        request, named_namespace(request), Scope.ADMIN, absent=_absent_there
    )
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    if not await context.artifacts.delete(key, actor=actor_of(request, principal)):
        raise _absent(key)
    return Response(status_code=204)


@router.post(
    _LOOKUP_PATH,
    response_class=Response,
    responses={
        200: {"model": LookupResponse},
        **access_refusals(
            ErrorCode.INVALID_NAMESPACE, ErrorCode.INVALID_REQUEST, ErrorCode.TOO_MANY_KEYS
        ),
    },
    openapi_extra=json_body(LookupRequest, IN_NAMESPACE),
)
async def lookup_artifacts(request: Request) -> Response:
    """Tells which of many artifacts exist, and pins these for ten minutes."""
    await authorized(request, named_namespace(request), Scope.READ)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    wanted = await read_model(
        request, LookupRequest, idle_seconds=context.settings.upload_idle_seconds
    )
    check_key_count(
        len(wanted.keys),
        most=MAX_LOOKUP_KEYS,
        way_out=f"at most {MAX_LOOKUP_KEYS} are looked up at once: ask in several requests",
    )
    asked = dict.fromkeys(StoredKey.of(where, key) for key in wanted.keys)
    found = await context.artifacts.lookup(where, list(asked))
    reply = {  # a LookupResponse; building a thousand models of checked values takes longer
        "found": [
            {
                "key": _in_body(key),
                "digest": str(found[key]),
                "size_bytes": found[key].size_bytes,
            }
            for key in asked
            if key in found
        ],
        "missing": [_in_body(key) for key in asked if key not in found],
    }
    return Response(to_json(reply), media_type="application/json")


@router.post(
    _VERIFY_PATH,
    response_class=Response,
    responses={
        200: {"model": VerifyResponse},
        **access_refusals(
            ErrorCode.INVALID_NAMESPACE,
            ErrorCode.INVALID_REQUEST,
            ErrorCode.INVALID_FINGERPRINT,
            ErrorCode.INVALID_DEVICE_TYPE,
            ErrorCode.INVALID_KIND,
            ErrorCode.UNAVAILABLE,
        ),
    },
    openapi_extra=json_body(ArtifactKey, IN_NAMESPACE),
)
async def verify_artifact(request: Request) -> Response:
    """Reads an artifact's blob again, and drops the artifact if it is damaged.

    For a client that got other bytes than were announced: it cannot know who changed them.
    """
    await authorized(request, named_namespace(request), Scope.READ)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    key = await read_model(request, ArtifactKey, idle_seconds=context.settings.upload_idle_seconds)
    reply = await context.artifacts.verify(StoredKey.of(where, key))
    return Response(
        reply.model_dump_json(),
        headers={"Cache-Control": "no-store"},
        media_type="application/json",
    )


async def _body(request: Request, upload: Upload) -> AsyncIterator[bytes]:
    """The bytes of an artifact. They may take hours: at their end, the rules that hold then count.

    Raises:
        ServerError: as `body_chunks` does; 403, 413 or 503 for what the rules let in no more.
    """
    context: ProcessContext = request.app.state.context
    async for chunk in body_chunks(request, idle_seconds=context.settings.upload_idle_seconds):
        yield chunk
    where = upload.key.namespace
    policy = await context.policies.of(where)
    context.uploads.check(where, upload.digest.size_bytes, policy=policy)
    if upload.replaces and not _changes(policy):
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"the namespace {where} became write-once meanwhile: nothing was stored, send the "
            "artifact again",
        )


def _in_body(key: StoredKey) -> dict[str, str]:
    return {
        "kind": key.kind.value,
        "device_type": key.device_type,
        "fingerprint": key.fingerprint,
    }


def _announced_size(request: Request) -> int:
    """Content-Length; the HTTP parser has refused everything but digits."""
    length = request.headers.get("content-length")
    if length is None:
        raise ServerError(
            ErrorCode.LENGTH_REQUIRED,
            "Content-Length is missing: room is reserved before the body is read, so send the "
            "size and no chunked transfer",
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


def _absent_there(request: Request) -> ServerError:
    """What is said of an artifact that may not be read: the same as of one that is not there."""
    return _absent(key_of(request))


def _absent(key: StoredKey) -> ServerError:
    return ServerError(
        ErrorCode.NOT_FOUND, f"there is no artifact {key.key} in the namespace {key.namespace}"
    )


def _changes(policy: NamespacePolicy) -> bool:
    """Whether what is under a key may be another artifact tomorrow."""
    return policy.mode is WriteMode.OVERWRITE


def _unchanged(row: StoredArtifact, policy: NamespacePolicy) -> dict[str, str]:
    """What a 304 repeats (RFC 9110 section 15.4.5)."""
    return {"ETag": row.digest.etag, "Cache-Control": _CACHE_CONTROL[_changes(policy)]}


def _headers(
    row: StoredArtifact, span: tuple[int, int] | None, policy: NamespacePolicy
) -> dict[str, str]:
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": "attachment",
        "ETag": row.digest.etag,
        "Repr-Digest": row.digest.repr_digest,
        "Accept-Ranges": "bytes",
        "Cache-Control": _CACHE_CONTROL[_changes(policy)],
    }
    if row.metadata_header:
        headers[HEADER_METADATA] = row.metadata_header
    if span is not None:
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{row.digest.size_bytes}"
    return headers


_CACHE_CONTROL: Final = {
    False: "private, max-age=31536000, immutable",
    True: "private, no-cache",
}
"""A year where what is under a key never changes; asked for every time where it may."""
