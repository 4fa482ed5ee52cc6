"""The list of what a namespace has withdrawn."""

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
    """Return the withdrawals after a position: what was withheld, deleted or replaced since.

    Entries are kept for 90 days, and the last 100,000 of a namespace. If nothing is new, the answer
    takes one read of one row.
    """
    query = read_query(call, WithdrawalQuery)
    return json_answer(await call.context.withdrawals.read(call.namespace, query))
