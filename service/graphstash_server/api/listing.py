"""API call that lists the artifacts of a namespace."""

from fastapi import Response

from graphstash_schema import ErrorCode, Scope
from graphstash_schema.listing import ArtifactList, ArtifactQuery
from graphstash_schema.protocol import API_PREFIX
from graphstash_server.api.calls import Calls, NamespaceCall, in_namespace, json_answer
from graphstash_server.api.queries import parameters_of, read_query

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["artifacts"])


@router.call(
    "GET",
    "/{namespace}/artifacts",
    needs=in_namespace(Scope.READ),
    query=parameters_of(ArtifactQuery),
    answers={200: {"model": ArtifactList}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_DEVICE_TYPE],
)
async def list_artifacts(call: NamespaceCall) -> Response:
    """Return a page of the servable artifacts. Counts no hits and no misses."""
    query = read_query(call, ArtifactQuery)
    return json_answer(await call.context.listing.list_artifacts(call.namespace, query))
