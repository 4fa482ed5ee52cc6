"""POST, PUT and DELETE of a lease: request, renew and release it."""

import asyncio
import logging
from typing import Final

from fastapi import Request, Response

from graphstash_schema import ErrorCode, LeaseOutcome, LeaseReply, LeaseRequest, LeaseState, Scope
from graphstash_schema.lease import MAX_LISTED_LEASES, HeldLease, HeldLeases
from graphstash_schema.protocol import API_PREFIX, HEADER_LEASE, MAX_WAIT_SECONDS
from graphstash_server.api.bodies import read_model
from graphstash_server.api.calls import (
    KEY,
    NO_STORE,
    Calls,
    NamespaceCall,
    in_namespace,
    json_answer,
    key_of,
)
from graphstash_server.errors import ServerError
from graphstash_server.reading.conditions import requested_wait
from graphstash_server.services.jobs.leases import Acquisition
from graphstash_server.services.namespaces import check_writable

__all__ = ["router"]

_LOGGER = logging.getLogger(__name__)

router = Calls(prefix=API_PREFIX, tags=["leases"])

_PATH: Final = "/{namespace}/leases/" + KEY
_OUTCOME: Final = {
    "name": "outcome",
    "in": "query",
    "required": True,
    "schema": {"type": "string", "enum": [outcome.value for outcome in LeaseOutcome]},
}
_SHOWN: Final = 40
_STATUS: Final = {LeaseState.GRANTED: 201, LeaseState.READY: 200, LeaseState.HELD: 202}


@router.call(
    "GET",
    "/{namespace}/leases",
    needs=in_namespace(Scope.WRITE),
    answers={200: {"model": HeldLeases}},
)
async def list_leases(call: NamespaceCall) -> Response:
    """Return the running compilations, at most 200, and how many requests wait for each."""
    held = await call.context.leases.list_held([call.namespace], limit=MAX_LISTED_LEASES)
    leases = tuple(HeldLease(**each._asdict() | {"key": each.key.key}) for each in held)
    return json_answer(HeldLeases(leases=leases))


@router.call(
    "POST",
    _PATH,
    needs=in_namespace(Scope.WRITE),
    body=LeaseRequest,
    answers={
        200: {"model": LeaseReply, "description": "the artifact is there, fetch it"},
        201: {"model": LeaseReply, "description": "granted: compile"},
        202: {"model": LeaseReply, "description": "another job compiles: retry"},
    },
    refuses=[ErrorCode.READ_ONLY, ErrorCode.TOO_MANY_LEASES],
)
async def acquire_lease(call: NamespaceCall) -> Response:
    """Request the right to compile. `Prefer: wait=<seconds>` waits for it or the artifact. In a
    read-only namespace the server responds 403, because jobs would only wait for each other.
    """
    request, leases = call.request, call.context.leases
    key = key_of(request)
    check_writable(key.namespace, call.policy)
    wanted = await read_model(call, LeaseRequest)
    check_writable(key.namespace, call.policy)  # the policy may have changed meanwhile
    wait_seconds = requested_wait(request.headers.get("prefer"), at_most_seconds=MAX_WAIT_SECONDS)
    gone = asyncio.create_task(_until_gone(request))
    now = asyncio.get_running_loop().time
    asked_at = now()
    try:
        acquisition = Acquisition(key, wanted, wait_seconds or 0.0, call.principal.party)
        reply = await leases.acquire(acquisition, gone=gone)
        waited_seconds = now() - asked_at
    finally:
        gone.cancel()
    try:
        await call.reauthorize()
        if reply.state is not LeaseState.READY:
            check_writable(key.namespace, call.policy)
    except ServerError:  # the caller may no longer write: free the lease for others
        if reply.token is not None:
            try:
                await leases.release(key, token=reply.token)
            except ServerError as error:
                _LOGGER.warning("a lease that was refused lasts until it expires: %s", error)
        raise
    headers = dict(NO_STORE)
    is_held = reply.state is LeaseState.HELD
    # A server that stops, or has too many waiters, cuts the wait short.
    if wait_seconds is not None and not (is_held and waited_seconds < wait_seconds):
        headers["Preference-Applied"] = f"wait={wait_seconds:.0f}"
    if is_held:
        headers["Retry-After"] = "1"
    return json_answer(reply, _STATUS[reply.state], headers=headers, exclude_none=True)


async def _until_gone(request: Request) -> None:
    """Return when the caller closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.call(
    "PUT",
    _PATH,
    needs=in_namespace(Scope.WRITE),
    body=LeaseRequest,
    answers={200: {"model": LeaseReply, "description": "renewed"}},
    refuses=[ErrorCode.LEASE_LOST],
)
async def renew_lease(call: NamespaceCall) -> Response:
    """Extend a lease. Returns 410 if another job may hold it by now."""
    key = key_of(call.request)
    wanted = await read_model(call, LeaseRequest)
    reply = await call.context.leases.renew(key, token=_token(call.request), request=wanted)
    return json_answer(reply, exclude_none=True)


@router.call(
    "DELETE",
    _PATH,
    needs=in_namespace(Scope.WRITE),
    query=[_OUTCOME],
    answers={204: {"description": "ended"}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.LEASE_LOST],
)
async def release_lease(call: NamespaceCall) -> Response:
    """End a lease and wake one waiter, which finds the artifact or gets the lease."""
    key = key_of(call.request)
    _check_outcome(call.request)
    await call.context.leases.release(key, token=_token(call.request))
    return Response(status_code=204)


def _check_outcome(request: Request) -> None:
    """Check the parameter, which protocol 1 requires and the server ignores."""
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
