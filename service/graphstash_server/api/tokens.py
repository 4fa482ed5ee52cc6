"""Administration: the caller's own access, tokens, and the audit log."""

from typing import Final

from fastapi import Response
from pydantic import Field

from graphstash_schema import (
    Access,
    AccessKind,
    AuditLog,
    ErrorCode,
    Namespace,
    TokenExchange,
    TokenIssued,
    TokenList,
    TokenRequest,
)
from graphstash_schema.model import WireModel
from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_server.api.bodies import parameters_of, read_model, read_query
from graphstash_server.api.calls import (
    ADMINISTRATOR,
    KNOWN,
    NO_STORE,
    Call,
    Calls,
    credentials_of,
    json_answer,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.identity.audit import MAX_AUDIT_ENTRIES

__all__ = ["router"]

router = Calls(prefix=ADMIN_PREFIX, tags=["administration"])

_MAX_ID: Final = 2**63 - 1


class _AuditQuery(WireModel):
    limit: int = Field(default=100, ge=1, le=MAX_AUDIT_ENTRIES, description="most entries")
    before: int | None = Field(
        default=None, ge=1, le=_MAX_ID, description="`next_before` of the page before"
    )
    namespace: Namespace | None = Field(default=None, description="only what happened in it")


@router.call("GET", "/access", needs=KNOWN, answers={200: {"model": Access}})
async def get_access(call: Call) -> Response:
    """Return the caller's identity and rights."""
    return json_answer(call.principal)


@router.call(
    "POST",
    "/tokens",
    needs=ADMINISTRATOR,
    body=TokenRequest,
    answers={
        201: {"model": TokenIssued, "description": "the only answer that ever holds the token"}
    },
    refuses=[ErrorCode.INVALID_PATTERN, ErrorCode.CONFLICT, ErrorCode.INSUFFICIENT_STORAGE],
)
async def create_token(call: Call) -> Response:
    """Create a token."""
    if call.principal.kind is AccessKind.OPEN:
        raise ServerError(
            ErrorCode.FORBIDDEN,
            "this server has no authentication, so anyone could create a lasting token: use "
            "`graphstash token create` on the server's host, and start with --auth tokens",
        )
    call.context.ownership.require()
    request = await read_model(call, TokenRequest)
    issued = await call.context.tokens.create(request, actor=call.actor)
    return json_answer(issued, 201)


@router.call(
    "POST",
    "/tokens:exchange",
    needs=KNOWN,
    body=TokenExchange,
    answers={
        201: {"model": TokenIssued, "description": "the only answer that ever holds the token"}
    },
    refuses=[
        ErrorCode.FORBIDDEN,
        ErrorCode.INVALID_PATTERN,
        ErrorCode.CONFLICT,
        ErrorCode.INSUFFICIENT_STORAGE,
    ],
)
async def exchange_token(call: Call) -> Response:
    """Exchange the JWT of the request for a revocable token with the same rights or fewer."""
    request = await read_model(call, TokenExchange)
    region, credentials = call.context.region, credentials_of(call.request)
    if region is not None and credentials is not None:
        return json_answer(await region.exchange(request, credentials=credentials), 201)
    issued = await call.context.tokens.exchange(
        request,
        caller=call.principal,
        max_lifetime_seconds=call.context.settings.oidc_token_seconds,
        actor=call.actor,
    )
    return json_answer(issued, 201)


@router.call("GET", "/tokens", needs=ADMINISTRATOR, answers={200: {"model": TokenList}})
async def list_tokens(call: Call) -> Response:
    """Return all tokens, newest first, without their secrets."""
    return json_answer(await call.context.tokens.list_all())


@router.call(
    "DELETE",
    "/tokens/{id}",
    needs=ADMINISTRATOR,
    answers={204: {"description": "revoked, now or before"}},
    refuses=[ErrorCode.NOT_FOUND, ErrorCode.INSUFFICIENT_STORAGE],
)
async def revoke_token(call: Call) -> Response:
    """Revoke a token. This server process refuses it at once, the others within two seconds."""
    token_id: str = call.request.path_params["id"]
    if await call.context.tokens.revoke(token_id, actor=call.actor) is None:
        raise ServerError(ErrorCode.NOT_FOUND, "there is no token of that id")
    call.context.access.forget_token(token_id)
    return Response(status_code=204, headers=NO_STORE)


@router.call(
    "GET",
    "/audit",
    needs=ADMINISTRATOR,
    query=parameters_of(_AuditQuery),
    answers={200: {"model": AuditLog}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_NAMESPACE],
)
async def get_audit(call: Call) -> Response:
    """Return a page of the audit log, newest first."""
    query = read_query(call, _AuditQuery)
    log = await call.context.audit.read(
        limit=query.limit, before=query.before, namespace=query.namespace
    )
    return json_answer(log)
