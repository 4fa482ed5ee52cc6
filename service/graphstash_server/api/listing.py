"""The lists of a namespace: its artifacts, and its withdrawals."""

from fastapi import Response

from graphstash_schema import ErrorCode, Scope
from graphstash_schema.listing import ArtifactList, ArtifactQuery
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.withdrawals import WithdrawalList, WithdrawalQuery
from graphstash_server.api.bodies import parameters_of, read_query
from graphstash_server.api.calls import Calls, NamespaceCall, in_namespace, json_answer

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


@router.call(
    "GET",
    "/{namespace}/withdrawals",
    # The rate of a busy namespace must not keep withdrawals from a region. A region's token may
    # read every namespace.
    needs=in_namespace(Scope.READ, counts=lambda _, principal: not principal.may_see_totals),
    query=parameters_of(WithdrawalQuery),
    answers={200: {"model": WithdrawalList}},
    refuses=[ErrorCode.INVALID_REQUEST],
)
async def list_withdrawals(call: NamespaceCall) -> Response:
    """Return the artifacts that were withheld, deleted or replaced after a position.

    An hourly round drops entries older than 90 days, and all but the last 100,000 of a namespace.
    """
    query = read_query(call, WithdrawalQuery)
    return json_answer(await call.context.withdrawals.read(call.namespace, query))
