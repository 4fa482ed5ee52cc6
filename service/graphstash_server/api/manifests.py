"""GET and PUT of a manifest."""

from typing import Final

from fastapi import APIRouter, Request, Response

from graphstash_schema import ErrorCode, Manifest, ManifestName, ManifestUpdate, Namespace, Scope
from graphstash_schema.protocol import API_PREFIX, MAX_MANIFEST_ENTRIES
from graphstash_server.api.access import access_refusals, authorized
from graphstash_server.api.bodies import check_key_count, json_body, read_model
from graphstash_server.api.paths import (
    IN_MANIFEST,
    manifest_of,
    named_namespace,
    namespace_of,
)
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.policies import check_writable

__all__ = ["router"]

router = APIRouter(prefix=API_PREFIX, tags=["manifests"])

_PATH: Final = "/{namespace}/manifests/{name}"
_BAD_WORD: Final = (
    ErrorCode.INVALID_NAMESPACE,
    ErrorCode.INVALID_NAME,
    ErrorCode.UNSUPPORTED_PROTOCOL,
)


@router.get(
    _PATH,
    response_class=Response,
    responses={200: {"model": Manifest}, **access_refusals(*_BAD_WORD, ErrorCode.NOT_FOUND)},
    openapi_extra={"parameters": IN_MANIFEST},
)
async def get_manifest(request: Request) -> Response:
    """The artifacts that a job used, most recently used first."""
    await authorized(request, named_namespace(request), Scope.READ, absent=_absent_there)
    context: ProcessContext = request.app.state.context
    where, name = namespace_of(request), manifest_of(request)
    manifest = await context.manifests.get(where, name)
    if manifest is None:
        raise _absent(where, name)
    return _answer(manifest, 200)


@router.put(
    _PATH,
    response_class=Response,
    responses={
        200: {"model": Manifest, "description": "merged"},
        201: {"model": Manifest, "description": "the first run"},
        **access_refusals(
            *_BAD_WORD,
            ErrorCode.READ_ONLY,
            ErrorCode.INVALID_REQUEST,
            ErrorCode.TOO_MANY_KEYS,
            ErrorCode.TOO_LARGE,
        ),
    },
    openapi_extra=json_body(ManifestUpdate, IN_MANIFEST),
)
async def put_manifest(request: Request) -> Response:
    """Merges what one run used; never replaces what others used."""
    await authorized(request, named_namespace(request), Scope.WRITE, absent=_absent_there)
    where, name = namespace_of(request), manifest_of(request)
    context: ProcessContext = request.app.state.context
    check_writable(where, await context.policies.of(where))
    update = await read_model(
        request, ManifestUpdate, idle_seconds=context.settings.upload_idle_seconds
    )
    check_key_count(
        len(update.keys),
        most=MAX_MANIFEST_ENTRIES,
        way_out=f"a manifest remembers at most {MAX_MANIFEST_ENTRIES}: send the most recently used "
        "ones",
    )
    keys = [StoredKey.of(where, key) for key in update.keys]
    manifest, is_new = await context.manifests.merge(where, name, keys)
    return _answer(manifest, 201 if is_new else 200)


def _absent_there(request: Request) -> ServerError:
    """What is said of a manifest that may not be read: the same as of one that is not there."""
    return _absent(namespace_of(request), manifest_of(request))


def _absent(where: Namespace, name: ManifestName) -> ServerError:
    return ServerError(ErrorCode.NOT_FOUND, f"there is no manifest {name} in the namespace {where}")


def _answer(manifest: Manifest, status_code: int) -> Response:
    return Response(
        manifest.model_dump_json(),
        status_code=status_code,
        headers={"Cache-Control": "no-store"},
        media_type="application/json",
    )
