"""POST, PUT and DELETE of a lease: ask for it, keep it, end it."""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response

from graphstash_schema import ErrorCode, LeaseOutcome, LeaseReply, LeaseRequest, LeaseState, Scope
from graphstash_schema.protocol import API_PREFIX, HEADER_LEASE, MAX_WAIT_SECONDS
from graphstash_server.api.access import access_refusals, authorized
from graphstash_server.api.bodies import ask_again, json_body, read_model
from graphstash_server.api.conditions import requested_wait
from graphstash_server.api.paths import IN_KEY, KEY, key_of, named_namespace
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.services.leases import Acquisition
from graphstash_server.services.policies import check_writable

__all__ = ["router"]

router = APIRouter(prefix=API_PREFIX, tags=["leases"])

_PATH: Final = "/{namespace}/leases/" + KEY
_BAD_WORD: Final = (
    ErrorCode.INVALID_NAMESPACE,
    ErrorCode.INVALID_KIND,
    ErrorCode.INVALID_DEVICE_TYPE,
    ErrorCode.INVALID_FINGERPRINT,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.UNSUPPORTED_PROTOCOL,
)
_OUTCOME: Final = {
    "name": "outcome",
    "in": "query",
    "required": True,
    "schema": {"type": "string", "enum": [outcome.value for outcome in LeaseOutcome]},
}
_SHOWN: Final = 40
_STATUS: Final = {LeaseState.GRANTED: 201, LeaseState.READY: 200, LeaseState.HELD: 202}


@router.post(
    _PATH,
    response_class=Response,
    status_code=201,
    responses={
        200: {"model": LeaseReply, "description": "the artifact is there, fetch it"},
        201: {"model": LeaseReply, "description": "granted: compile"},
        202: {"model": LeaseReply, "description": "somebody else compiles: ask again"},
        **access_refusals(*_BAD_WORD, ErrorCode.READ_ONLY, ErrorCode.UNAVAILABLE),
    },
    openapi_extra=json_body(LeaseRequest, IN_KEY),
)
async def acquire_lease(request: Request) -> Response:
    """Asks for the right to compile; `Prefer: wait=<seconds>` waits for it or for the artifact.

    Where nothing can be published nobody waits for others, one after the other: 403.
    """
    await authorized(request, named_namespace(request), Scope.WRITE)
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    check_writable(key.namespace, await context.policies.of(key.namespace))
    wanted = await read_model(
        request, LeaseRequest, idle_seconds=context.settings.upload_idle_seconds
    )
    wait_seconds = requested_wait(request.headers.get("prefer"), at_most_seconds=MAX_WAIT_SECONDS)
    gone = asyncio.create_task(_until_gone(request))
    try:
        reply = await context.leases.acquire(
            Acquisition(key, wanted, wait_seconds or 0.0), gone=gone
        )
    finally:
        gone.cancel()
    try:
        await ask_again(request)
    except ServerError:  # whoever may not have it must not keep others from it either
        if reply.token is not None:
            await context.leases.release(key, token=reply.token)
        raise
    headers = {}
    if wait_seconds is not None:
        headers["Preference-Applied"] = f"wait={wait_seconds:.0f}"
    if reply.state is LeaseState.HELD:
        headers["Retry-After"] = "1"
    return _answer(reply, _STATUS[reply.state], headers)


@router.put(
    _PATH,
    response_class=Response,
    responses={
        200: {"model": LeaseReply, "description": "renewed"},
        **access_refusals(*_BAD_WORD, ErrorCode.LEASE_LOST),
    },
    openapi_extra=json_body(LeaseRequest, IN_KEY),
)
async def renew_lease(request: Request) -> Response:
    """Keeps a lease for longer; 410 when somebody else may have it by now."""
    await authorized(request, named_namespace(request), Scope.WRITE)
    key = key_of(request)
    context: ProcessContext = request.app.state.context
    wanted = await read_model(
        request, LeaseRequest, idle_seconds=context.settings.upload_idle_seconds
    )
    reply = await context.leases.renew(key, token=_token(request), request=wanted)
    return _answer(reply, 200, {})


@router.delete(
    _PATH,
    response_class=Response,
    status_code=204,
    responses={
        204: {"description": "ended"},
        **access_refusals(*_BAD_WORD, ErrorCode.LEASE_LOST),
    },
    openapi_extra={"parameters": [*IN_KEY, _OUTCOME]},
)
async def release_lease(request: Request) -> Response:
    """Ends a lease: after `published` the artifact is there, after `failed` a waiter compiles."""
    await authorized(request, named_namespace(request), Scope.WRITE)
    key = key_of(request)
    _check_outcome(request)
    context: ProcessContext = request.app.state.context
    await context.leases.release(key, token=_token(request))
    return Response(status_code=204)


def _check_outcome(request: Request) -> None:
    """It is checked and documented, no more: who waits looks for itself."""
    outcome = request.query_params.get("outcome")
    if outcome not in set(LeaseOutcome):
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"query.outcome: {(outcome or '')[:_SHOWN]!r} is not valid: expected one of "
            f"{', '.join(LeaseOutcome)}",
        )


def _token(request: Request) -> str:
    token = request.headers.get(HEADER_LEASE)
    if token is None:
        raise ServerError(
            ErrorCode.INVALID_REQUEST, f"{HEADER_LEASE} is missing: send the token of the grant"
        )
    return token


def _answer(reply: LeaseReply, status_code: int, headers: dict[str, str]) -> Response:
    return Response(
        reply.model_dump_json(exclude_none=True),
        status_code=status_code,
        headers={"Cache-Control": "no-store", **headers},
        media_type="application/json",
    )


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
