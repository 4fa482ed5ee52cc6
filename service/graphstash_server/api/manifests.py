"""GET and PUT of a manifest."""

from typing import Final

from fastapi import Request, Response

from graphstash_schema import ErrorCode, Manifest, ManifestName, ManifestUpdate, Namespace, Scope
from graphstash_schema.protocol import API_PREFIX, MAX_MANIFEST_ENTRIES
from graphstash_server.api.bodies import read_keys
from graphstash_server.api.calls import (
    Calls,
    NamespaceCall,
    in_namespace,
    json_answer,
    manifest_of,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.namespaces import check_writable

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["manifests"])

_PATH: Final = "/{namespace}/manifests/{name}"


def _absent_there(request: Request) -> ServerError:
    """The answer for a manifest that the caller may not read: as if it did not exist."""
    return _absent(Namespace(request.path_params["namespace"]), manifest_of(request))


@router.call(
    "GET",
    _PATH,
    needs=in_namespace(Scope.READ, absent=_absent_there),
    answers={200: {"model": Manifest}},
)
async def get_manifest(call: NamespaceCall) -> Response:
    """The artifacts that a job used, most recently used first."""
    where, name = call.namespace, manifest_of(call.request)
    manifest = await call.context.manifests.get(where, name)
    if manifest is None:
        raise _absent(where, name)
    return json_answer(manifest)


@router.call(
    "PUT",
    _PATH,
    needs=in_namespace(Scope.WRITE, absent=_absent_there),
    body=ManifestUpdate,
    answers={
        200: {"model": Manifest, "description": "merged"},
        201: {"model": Manifest, "description": "the first run"},
    },
    refuses=[ErrorCode.READ_ONLY, ErrorCode.TOO_MANY_KEYS, ErrorCode.INSUFFICIENT_STORAGE],
)
async def put_manifest(call: NamespaceCall) -> Response:
    """Merges what one run used; never replaces what others used."""
    where, name = call.namespace, manifest_of(call.request)
    check_writable(where, call.policy)
    keys = await read_keys(
        call,
        ManifestUpdate,
        max_keys=MAX_MANIFEST_ENTRIES,
        way_out=f"the limit is {MAX_MANIFEST_ENTRIES}: send the most recently used ones",
    )
    manifest, is_new = await call.context.manifests.merge(
        where, name, keys, writer=call.principal.party, actor=call.actor
    )
    return json_answer(manifest, 201 if is_new else 200)


def _absent(where: Namespace, name: ManifestName) -> ServerError:
    return ServerError(ErrorCode.NOT_FOUND, f"there is no manifest {name} in namespace {where}")
