"""The policies of namespaces: who administers the server sets them."""

from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from graphstash_schema import (
    ErrorCode,
    Namespace,
    NamespaceInfo,
    NamespaceList,
    NamespacePolicy,
    Scope,
)
from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_server.api.access import actor_of, administrator, authorized
from graphstash_server.api.bodies import json_body, read_model
from graphstash_server.api.paths import IN_NAMESPACE, named_namespace, namespace_of
from graphstash_server.api.problems import refusals
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = APIRouter(prefix=ADMIN_PREFIX, tags=["administration"])

_PATH: Final = "/namespaces/{namespace}"
_NO_STORE: Final = {"Cache-Control": "no-store"}
_NO_ADMINISTRATOR: Final = (
    ErrorCode.UNSUPPORTED_PROTOCOL,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.FORBIDDEN,
    ErrorCode.UNAVAILABLE,
)


@router.get(
    "/namespaces",
    response_class=Response,
    responses={200: {"model": NamespaceList}, **refusals(*_NO_ADMINISTRATOR)},
)
async def list_namespaces(request: Request) -> Response:
    """Every namespace that has a policy of its own."""
    await administrator(request)
    context: ProcessContext = request.app.state.context
    return _answer(NamespaceList(namespaces=tuple(await context.policies.list_all())))


@router.get(
    _PATH,
    response_class=Response,
    responses={
        200: {"model": NamespaceInfo},
        **refusals(
            *_NO_ADMINISTRATOR,
            ErrorCode.INVALID_NAMESPACE,
            ErrorCode.NOT_FOUND,
            ErrorCode.RATE_LIMITED,
        ),
    },
    openapi_extra={"parameters": IN_NAMESPACE},
)
async def get_namespace(request: Request) -> Response:
    """The policy of a namespace, for who administers it; 404 when it has none of its own."""
    await authorized(request, named_namespace(request), Scope.ADMIN)
    context: ProcessContext = request.app.state.context
    where = namespace_of(request)
    info = await context.policies.find(where)
    if info is None:
        raise _no_policy(where)
    return _answer(info)


@router.put(
    _PATH,
    response_class=Response,
    responses={
        200: {"model": NamespaceInfo},
        **refusals(
            *_NO_ADMINISTRATOR,
            ErrorCode.INVALID_NAMESPACE,
            ErrorCode.INVALID_REQUEST,
            ErrorCode.LENGTH_MISMATCH,
            ErrorCode.UPLOAD_TIMEOUT,
            ErrorCode.TOO_LARGE,
            ErrorCode.INSUFFICIENT_STORAGE,
        ),
    },
    openapi_extra=json_body(NamespacePolicy, IN_NAMESPACE),
)
async def put_namespace(request: Request) -> Response:
    """Gives a namespace a policy, in place of the one that it had; what is left out is default."""
    principal = await administrator(request)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    policy = await read_model(
        request, NamespacePolicy, idle_seconds=context.settings.upload_idle_seconds
    )
    return _answer(await context.policies.put(where, policy, actor_of(request, principal)))


@router.delete(
    _PATH,
    response_class=Response,
    status_code=204,
    responses={
        204: {"description": "the defaults hold"},
        **refusals(
            *_NO_ADMINISTRATOR,
            ErrorCode.INVALID_NAMESPACE,
            ErrorCode.NOT_FOUND,
            ErrorCode.INSUFFICIENT_STORAGE,
        ),
    },
    openapi_extra={"parameters": IN_NAMESPACE},
)
async def delete_namespace(request: Request) -> Response:
    """Takes a namespace's policy away; its artifacts stay."""
    principal = await administrator(request)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    if not await context.policies.remove(where, actor_of(request, principal)):
        raise _no_policy(where)
    return Response(status_code=204, headers=_NO_STORE)


def _no_policy(namespace: Namespace) -> ServerError:
    return ServerError(
        ErrorCode.NOT_FOUND,
        f"the namespace {namespace} has no policy of its own: the defaults hold",
    )


def _answer(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), headers=_NO_STORE, media_type="application/json")
