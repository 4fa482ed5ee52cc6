"""The policies of namespaces, which administrators of the server set."""

from typing import Final

from fastapi import Response

from graphstash_schema import (
    ErrorCode,
    Namespace,
    NamespaceInfo,
    NamespaceList,
    NamespacePolicy,
    Scope,
)
from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_server.api.bodies import read_model
from graphstash_server.api.calls import (
    ADMINISTRATOR,
    NO_STORE,
    Call,
    Calls,
    NamespaceCall,
    in_namespace,
    json_answer,
)
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = Calls(prefix=ADMIN_PREFIX, tags=["administration"])

_PATH: Final = "/namespaces/{namespace}"


@router.call(
    "GET",
    "/namespaces",
    needs=ADMINISTRATOR,
    answers={200: {"model": NamespaceList}},
)
async def list_namespaces(call: Call) -> Response:
    """Return the namespaces that have a policy, with their policies."""
    return json_answer(NamespaceList(namespaces=tuple(await call.context.policies.list_all())))


@router.call(
    "GET",
    _PATH,
    needs=in_namespace(Scope.ADMIN),
    answers={200: {"model": NamespaceInfo}},
)
async def get_namespace(call: NamespaceCall) -> Response:
    """Return the policy of a namespace to its administrators, or 404 if it has none."""
    info = await call.context.policies.find(call.namespace)
    if info is None:
        raise _no_policy(call.namespace)
    return json_answer(info)


@router.call(
    "PUT",
    _PATH,
    needs=ADMINISTRATOR,
    body=NamespacePolicy,
    answers={200: {"model": NamespaceInfo}},
    refuses=[ErrorCode.INSUFFICIENT_STORAGE],
)
async def put_namespace(call: Call) -> Response:
    """Replace the policy of a namespace. Omitted fields get their default."""
    namespace = Namespace(call.request.path_params["namespace"])
    call.context.ownership.require()
    policy = await read_model(call, NamespacePolicy)
    return json_answer(await call.context.policies.put(namespace, policy, call.actor))


@router.call(
    "DELETE",
    _PATH,
    needs=ADMINISTRATOR,
    answers={204: {"description": "the defaults apply"}},
    refuses=[ErrorCode.NOT_FOUND, ErrorCode.INSUFFICIENT_STORAGE],
)
async def delete_namespace(call: Call) -> Response:
    """Remove a namespace's policy, so that the defaults apply. Its artifacts stay."""
    namespace = Namespace(call.request.path_params["namespace"])
    call.context.ownership.require()
    if not await call.context.policies.remove(namespace, call.actor):
        raise _no_policy(namespace)
    return Response(status_code=204, headers=NO_STORE)


def _no_policy(namespace: Namespace) -> ServerError:
    return ServerError(
        ErrorCode.NOT_FOUND,
        f"the namespace {namespace} has no policy of its own: the defaults apply",
    )
