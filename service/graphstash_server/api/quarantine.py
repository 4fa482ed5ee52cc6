"""Reports of wrong artifacts, what is withheld because of them, and its release."""

from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from graphstash_schema import (
    ArtifactKey,
    ErrorCode,
    Namespace,
    ReportRequest,
    ReportResponse,
    Scope,
    WithheldList,
)
from graphstash_schema.protocol import ADMIN_PREFIX, API_PREFIX
from graphstash_server.api.access import access_refusals, actor_of, administrator, authorized
from graphstash_server.api.bodies import json_body, read_model
from graphstash_server.api.paths import IN_NAMESPACE, named_namespace, namespace_of
from graphstash_server.context import ProcessContext
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = ["router"]

router = APIRouter()

_NO_STORE: Final = {"Cache-Control": "no-store"}
_BAD_BODY: Final = (
    ErrorCode.UNSUPPORTED_PROTOCOL,
    ErrorCode.INVALID_NAMESPACE,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.INVALID_KIND,
    ErrorCode.INVALID_DEVICE_TYPE,
    ErrorCode.INVALID_FINGERPRINT,
    ErrorCode.LENGTH_MISMATCH,
    ErrorCode.UPLOAD_TIMEOUT,
    ErrorCode.TOO_LARGE,
    ErrorCode.INSUFFICIENT_STORAGE,
)


@router.post(
    API_PREFIX + "/{namespace}/artifacts:report",
    tags=["artifacts"],
    response_class=Response,
    responses={200: {"model": ReportResponse}, **access_refusals(*_BAD_BODY)},
    openapi_extra=json_body(ReportRequest, IN_NAMESPACE),
)
async def report_artifact(request: Request) -> Response:
    """Says that an artifact is wrong: nobody gets it until an admin decides.

    Who may write is believed; the report of who may only read is counted and changes nothing.
    """
    principal = await authorized(request, named_namespace(request), Scope.READ)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    report = await read_model(
        request, ReportRequest, idle_seconds=context.settings.upload_idle_seconds
    )
    reply = await context.quarantine.report(
        StoredKey.of(where, report.key),
        report,
        actor=actor_of(request, principal),
        may_withhold=principal.may_write(where, await context.policies.of(where)),
    )
    return _answer(reply)


@router.post(
    API_PREFIX + "/{namespace}/artifacts:release",
    tags=["artifacts"],
    response_class=Response,
    status_code=204,
    responses={204: {"description": "it is served again"}, **access_refusals(*_BAD_BODY)},
    openapi_extra=json_body(ArtifactKey, IN_NAMESPACE),
)
async def release_artifact(request: Request) -> Response:
    """Serves a withheld artifact again; 404 when it is not withheld. DELETE removes it instead."""
    principal = await authorized(request, named_namespace(request), Scope.ADMIN)
    where = namespace_of(request)
    context: ProcessContext = request.app.state.context
    key = await read_model(request, ArtifactKey, idle_seconds=context.settings.upload_idle_seconds)
    wanted = StoredKey.of(where, key)
    if not await context.quarantine.release(wanted, actor=actor_of(request, principal)):
        raise ServerError(
            ErrorCode.NOT_FOUND, f"no artifact {key} is withheld in the namespace {where}"
        )
    return Response(status_code=204, headers=_NO_STORE)


@router.get(
    ADMIN_PREFIX + "/quarantine",
    tags=["administration"],
    response_class=Response,
    responses={
        200: {"model": WithheldList},
        **access_refusals(ErrorCode.UNSUPPORTED_PROTOCOL, ErrorCode.INVALID_NAMESPACE),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "namespace",
                "in": "query",
                "required": False,
                "description": "only of this one: for who administers it alone",
                "schema": {"type": "string", "pattern": f"^{Namespace.form.pattern}$"},
            }
        ]
    },
)
async def list_withheld(request: Request) -> Response:
    """Artifacts that are withheld, the newest report first; at most 1,000."""
    context: ProcessContext = request.app.state.context
    namespace = request.query_params.get("namespace")
    if namespace is None:
        await administrator(request)
        return _answer(await context.quarantine.list_withheld())
    await authorized(request, namespace, Scope.ADMIN)
    return _answer(await context.quarantine.list_withheld(Namespace(namespace)))


def _answer(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), headers=_NO_STORE, media_type="application/json")
