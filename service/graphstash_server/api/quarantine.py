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
    KEY_ERRORS,
    NO_STORE,
    Call,
    Calls,
    NamespaceCall,
    Right,
    credentials_of,
    in_namespace,
    json_answer,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = ["router"]

router = Calls()

_REFUSALS: Final = (*KEY_ERRORS, ErrorCode.INSUFFICIENT_STORAGE)
_NAMESPACE: Final = {
    "name": "namespace",
    "in": "query",
    "required": False,
    "description": "list only this namespace, which its administrators also may",
    "schema": {"type": "string", "pattern": f"^{Namespace.form.pattern}$"},
}
_ADMIN_THERE: Final = in_namespace(
    Scope.ADMIN, named=lambda request: request.query_params["namespace"]
)


async def _admit_administrator(request: Request) -> Call:
    """Admit administrators of the namespace in the query. Without one, admit only the server's."""
    has_namespace = "namespace" in request.query_params
    return await (_ADMIN_THERE if has_namespace else ADMINISTRATOR).admit(request)


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

    If the blob is lost or damaged, the server drops the artifact. Otherwise a writer's report
    withholds it if the writer administers the namespace, if another writer has reported it, or if
    the blob is not an envelope of this key. Other callers' reports are only counted, and so are
    reports of an unknown or missing signature.
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
    region, credentials = call.context.region, credentials_of(call.request)
    if region is not None and credentials is not None:
        await region.report(where, report, credentials=credentials)
    return json_answer(reply)


@router.call(
    "POST",
    API_PREFIX + "/{namespace}/artifacts:release",
    tags=["artifacts"],
    needs=in_namespace(Scope.ADMIN),
    body=ArtifactKey,
    answers={204: {"description": "the artifact is served again"}},
    refuses=_REFUSALS,
)
async def release_artifact(call: NamespaceCall) -> Response:
    """Serve a withheld artifact again. 404 if it is not withheld. To remove it, use DELETE."""
    key = await read_model(call, ArtifactKey)
    stored = StoredKey.of(call.namespace, key)
    if not await call.context.quarantine.release(stored, actor=call.actor):
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
    """Return at most 1,000 withheld artifacts, newest report first."""
    where = call.namespace if isinstance(call, NamespaceCall) else None
    return json_answer(await call.context.quarantine.list_withheld(where))
