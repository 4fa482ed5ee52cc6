"""GET and PUT of a manifest."""

from collections.abc import Sequence
from typing import Final

from fastapi import Request, Response
from pydantic_core import to_json

from graphstash_schema import ErrorCode, Manifest, ManifestName, ManifestUpdate, Namespace, Scope
from graphstash_schema.protocol import API_PREFIX, HEADER_WRITERS, MAX_MANIFEST_ENTRIES
from graphstash_server.api.bodies import read_keys
from graphstash_server.api.calls import (
    NO_STORE,
    Calls,
    NamespaceCall,
    in_namespace,
    manifest_of,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.jobs.manifests import StoredEntry
from graphstash_server.services.namespaces import check_writable

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["manifests"])

_PATH: Final = "/{namespace}/manifests/{name}"


def _hidden(request: Request) -> ServerError:
    """Return the error for callers without read access, as if the manifest did not exist."""
    return _absent(Namespace(request.path_params["namespace"]), manifest_of(request))


@router.call(
    "GET",
    _PATH,
    needs=in_namespace(Scope.READ, absent=_hidden),
    answers={200: {"model": Manifest}},
)
async def get_manifest(call: NamespaceCall) -> Response:
    """Return the artifacts that a job used, most recently used first."""
    name = manifest_of(call.request)
    entries = await call.context.manifests.get(call.namespace, name)
    if not entries:
        raise _absent(call.namespace, name)
    return _answer(name, entries, has_writers=call.request.headers.get(HEADER_WRITERS) == "1")


@router.call(
    "PUT",
    _PATH,
    needs=in_namespace(Scope.WRITE, absent=_hidden),
    body=ManifestUpdate,
    answers={
        200: {"model": Manifest, "description": "merged"},
        201: {"model": Manifest, "description": "the first run"},
    },
    refuses=[ErrorCode.READ_ONLY, ErrorCode.TOO_MANY_KEYS, ErrorCode.INSUFFICIENT_STORAGE],
)
async def put_manifest(call: NamespaceCall) -> Response:
    """Add the artifacts that one run used. Above a limit, the least recently used are dropped."""
    name = manifest_of(call.request)
    check_writable(call.namespace, call.policy)  # before the body, which would be in vain
    keys = await read_keys(
        call,
        ManifestUpdate,
        max_keys=MAX_MANIFEST_ENTRIES,
        advice=f"the limit is {MAX_MANIFEST_ENTRIES}: send the most recently used ones",
    )
    check_writable(call.namespace, call.policy)  # the policy may have changed meanwhile
    entries, is_new = await call.context.manifests.merge(
        call.namespace, name, keys, writer=call.principal.party, actor=call.actor
    )
    return _answer(name, entries, status_code=201 if is_new else 200)


def _answer(
    name: ManifestName,
    entries: Sequence[StoredEntry],
    *,
    has_writers: bool = False,
    status_code: int = 200,
) -> Response:
    """Build the JSON of a `Manifest` as text: models would take twenty times as long. No stored
    word contains a character that JSON escapes.
    """
    times = {entry.used_at for entry in entries}
    as_json = {each: to_json(each).decode() for each in times}  # all entries of a run share a time
    # Numbers do not reveal the writers' names. An entry of several writers has none.
    writers = dict.fromkeys(entry.writer for entry in entries)
    numbers = {
        each: f',"writer":{number}' if each and has_writers else ""
        for number, each in enumerate(writers)
    }
    listed = ",".join(
        [
            f'{{"key":{{"kind":"{kind}","device_type":"{device_type}",'
            f'"fingerprint":"{fingerprint}"}},"used_at":{as_json[used_at]},"runs":{runs}'
            f"{numbers[writer]}}}"
            for kind, device_type, fingerprint, used_at, runs, writer in entries
        ]
    )
    return Response(
        f'{{"name":"{name}","entries":[{listed}]}}',
        status_code=status_code,
        headers=NO_STORE,
        media_type="application/json",
    )


def _absent(namespace: Namespace, name: ManifestName) -> ServerError:
    return ServerError(ErrorCode.NOT_FOUND, f"there is no manifest {name} in namespace {namespace}")
