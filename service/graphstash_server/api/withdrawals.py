"""The list of a namespace's withdrawals."""

from fastapi import Response

from graphstash_schema import ErrorCode, Scope
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.withdrawals import WithdrawalList, WithdrawalQuery
from graphstash_server.api.calls import Calls, NamespaceCall, in_namespace, json_answer
from graphstash_server.api.queries import parameters_of, read_query

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["artifacts"])


@router.call(
    "GET",
    "/{namespace}/withdrawals",
    needs=in_namespace(Scope.READ),
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
