"""The server's administration: who the caller is, tokens, and the audit log."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphstash_schema import (
    Access,
    AccessKind,
    AuditLog,
    ErrorCode,
    Namespace,
    TokenIssued,
    TokenList,
    TokenRequest,
)
from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_server.api.access import actor_of, administrator, authenticated
from graphstash_server.api.bodies import json_body, read_model
from graphstash_server.api.problems import invalid_body, refusals
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.services.audit import MAX_AUDIT_ENTRIES

__all__ = ["router"]

router = APIRouter(prefix=ADMIN_PREFIX, tags=["administration"])

_ONE: Final = "/tokens/{id}"
_NO_STORE: Final = {"Cache-Control": "no-store"}
_MAX_ID: Final = 2**63 - 1
_NOT_KNOWN: Final = (
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.UNSUPPORTED_PROTOCOL,
    ErrorCode.UNAVAILABLE,
)
_NO_ADMINISTRATOR: Final = (*_NOT_KNOWN, ErrorCode.FORBIDDEN)


class _AuditQuery(BaseModel):
    """Which page of the audit log is wanted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    limit: int = Field(default=100, ge=1, le=MAX_AUDIT_ENTRIES, description="most entries")
    before: int | None = Field(
        default=None, ge=1, le=_MAX_ID, description="`next_before` of the page before"
    )
    namespace: Namespace | None = Field(default=None, description="only what happened in it")


@router.get(
    "/access",
    response_class=Response,
    responses={200: {"model": Access}, **refusals(*_NOT_KNOWN)},
)
async def get_access(request: Request) -> Response:
    """Who the caller is to the server, and what they may do."""
    principal = await authenticated(request)
    return _answer(principal.access, 200)


@router.post(
    "/tokens",
    response_class=Response,
    status_code=201,
    responses={
        201: {"model": TokenIssued, "description": "the only answer that ever holds the token"},
        **refusals(
            *_NO_ADMINISTRATOR,
            ErrorCode.INVALID_REQUEST,
            ErrorCode.INVALID_PATTERN,
            ErrorCode.CONFLICT,
            ErrorCode.TOO_LARGE,
            ErrorCode.UPLOAD_TIMEOUT,
            ErrorCode.INSUFFICIENT_STORAGE,
        ),
    },
    openapi_extra=json_body(TokenRequest, []),
)
async def create_token(request: Request) -> Response:
    """Makes a token."""
    principal = await administrator(request)
    if principal.kind is AccessKind.OPEN:
        raise ServerError(
            ErrorCode.FORBIDDEN,
            "this server asks nobody who they are, and a token would outlive that: make it with "
            "`graphstash token create` on the server's host, and start with --auth tokens",
        )
    context: ProcessContext = request.app.state.context
    wanted = await read_model(
        request, TokenRequest, idle_seconds=context.settings.upload_idle_seconds
    )
    issued = await context.tokens.create(wanted, actor=actor_of(request, principal))
    return _answer(issued, 201)


@router.get(
    "/tokens",
    response_class=Response,
    responses={200: {"model": TokenList}, **refusals(*_NO_ADMINISTRATOR)},
)
async def list_tokens(request: Request) -> Response:
    """All tokens, newest first; without their secrets, which nobody has."""
    await administrator(request)
    context: ProcessContext = request.app.state.context
    return _answer(await context.tokens.list_all(), 200)


@router.delete(
    _ONE,
    response_class=Response,
    status_code=204,
    responses={
        204: {"description": "revoked, now or before"},
        **refusals(*_NO_ADMINISTRATOR, ErrorCode.NOT_FOUND, ErrorCode.INSUFFICIENT_STORAGE),
    },
    openapi_extra={
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    },
)
async def revoke_token(request: Request) -> Response:
    """Revokes a token for good: this process takes it no more, and none within two seconds."""
    principal = await administrator(request)
    context: ProcessContext = request.app.state.context
    token_id: str = request.path_params["id"]
    actor = actor_of(request, principal)
    if await context.tokens.revoke(token_id, actor=actor) is None:
        raise ServerError(ErrorCode.NOT_FOUND, "there is no token of that id")
    context.access.forget_token(token_id)
    return Response(status_code=204, headers=_NO_STORE)


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """OpenAPI: the fields of a model as parameters of the query."""
    properties = model.model_json_schema()["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


@router.get(
    "/audit",
    response_class=Response,
    responses={
        200: {"model": AuditLog},
        **refusals(*_NO_ADMINISTRATOR, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_NAMESPACE),
    },
    openapi_extra={"parameters": _parameters(_AuditQuery)},
)
async def get_audit(request: Request) -> Response:
    """Who wrote, deleted, or changed who may; newest first."""
    await administrator(request)
    context: ProcessContext = request.app.state.context
    try:
        wanted = _AuditQuery.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise invalid_body(error) from None
    log = await context.audit.read(
        limit=wanted.limit, before=wanted.before, namespace=wanted.namespace
    )
    return _answer(log, 200)


def _answer(model: BaseModel, status_code: int) -> Response:
    return Response(
        model.model_dump_json(),
        status_code=status_code,
        headers=_NO_STORE,
        media_type="application/json",
    )
