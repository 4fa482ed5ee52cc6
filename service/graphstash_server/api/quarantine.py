"""Reports of wrong artifacts, the list of withheld artifacts, and their release."""

from typing import Final

from fastapi import Request, Response

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
from graphstash_server.api.bodies import read_model
from graphstash_server.api.calls import (
    ADMINISTRATOR,
    NO_STORE,
    Call,
    Calls,
    NamespaceCall,
    Right,
    in_namespace,
    json_answer,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = ["router"]

router = Calls()

_REFUSALS: Final = (
    ErrorCode.INVALID_KIND,
    ErrorCode.INVALID_DEVICE_TYPE,
    ErrorCode.INVALID_FINGERPRINT,
    ErrorCode.INSUFFICIENT_STORAGE,
)
_NAMESPACE: Final = {
    "name": "namespace",
    "in": "query",
    "required": False,
    "description": "only of this namespace, whose administrators may ask, too",
    "schema": {"type": "string", "pattern": f"^{Namespace.form.pattern}$"},
}
_ADMIN_THERE: Final = in_namespace(
    Scope.ADMIN, named=lambda request: request.query_params["namespace"]
)


async def _admit_administrator(request: Request) -> Call:
    """Admit administrators of the namespace in the query, or of the server if there is none."""
    is_one = "namespace" in request.query_params
    return await (_ADMIN_THERE if is_one else ADMINISTRATOR).admit(request)


@router.call(
    "POST",
    API_PREFIX + "/{namespace}/artifacts:report",
    tags=["artifacts"],
    needs=in_namespace(Scope.READ),
    body=ReportRequest,
    answers={200: {"model": ReportResponse}},
    refuses=_REFUSALS,
)
async def report_artifact(call: NamespaceCall) -> Response:
    """Report an artifact as wrong. The server may withhold it until an administrator decides.

    A report of a writer withholds the artifact in two cases: the server also finds it wrong (no
    envelope, or one of another key), or another writer reported it before. A namespace
    administrator's report always withholds it. Reports of other callers are counted.
    """
    where = call.namespace
    report = await read_model(call, ReportRequest)
    policy = await call.context.policies.of(where)
    reply = await call.context.quarantine.report(
        StoredKey.of(where, report.key),
        report,
        actor=call.actor,
        party=call.principal.party,
        may_withhold=call.principal.may(Scope.WRITE, where, policy),
        may_decide=call.principal.may(Scope.ADMIN, where, policy),
    )
    return json_answer(reply)


@router.call(
    "POST",
    API_PREFIX + "/{namespace}/artifacts:release",
    tags=["artifacts"],
    needs=in_namespace(Scope.ADMIN),
    body=ArtifactKey,
    answers={204: {"description": "it is served again"}},
    refuses=_REFUSALS,
)
async def release_artifact(call: NamespaceCall) -> Response:
    """Serve a withheld artifact again, or respond 404 if it is not. DELETE removes it instead."""
    key = await read_model(call, ArtifactKey)
    wanted = StoredKey.of(call.namespace, key)
    if not await call.context.quarantine.release(wanted, actor=call.actor):
        raise ServerError(
            ErrorCode.NOT_FOUND, f"artifact {key} is not withheld in namespace {call.namespace}"
        )
    return Response(status_code=204, headers=NO_STORE)


@router.call(
    "GET",
    ADMIN_PREFIX + "/quarantine",
    tags=["administration"],
    needs=Right(_admit_administrator, _ADMIN_THERE.refusals),
    query=[_NAMESPACE],
    answers={200: {"model": WithheldList}},
)
async def list_withheld(call: Call) -> Response:
    """Return the withheld artifacts, newest report first, at most 1,000."""
    where = call.namespace if isinstance(call, NamespaceCall) else None
    return json_answer(await call.context.quarantine.list_withheld(where))
