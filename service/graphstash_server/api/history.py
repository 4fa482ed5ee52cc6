"""The history of hits and misses."""

from fastapi import Response

from graphstash_schema import ErrorCode, Namespace
from graphstash_schema.history import History, HistoryQuery
from graphstash_schema.protocol import API_PREFIX
from graphstash_server.api.bodies import parameters_of, read_query
from graphstash_server.api.calls import KNOWN, Call, Calls, json_answer

__all__ = ["router"]

router = Calls(tags=["administration"])


@router.call(
    "GET",
    API_PREFIX + "/stats/history",
    needs=KNOWN,
    query=parameters_of(HistoryQuery),
    answers={200: {"model": History}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_NAMESPACE],
)
async def get_history(call: Call) -> Response:
    """Return hits, misses, uploads and savings by hour or day, in all readable namespaces."""
    query = read_query(call, HistoryQuery)
    namespaces = await _readable(call, query.namespace)
    return json_answer(await call.context.history.read(query, namespaces=namespaces))


async def _readable(call: Call, namespace: Namespace | None) -> list[str] | None:
    """Return the requested namespaces that the caller may read, or None for all."""
    if call.principal.may_see_totals:
        return None if namespace is None else [namespace]
    names = await call.context.policies.namespaces() if namespace is None else [namespace]
    return [name for name in names if await call.may_read(Namespace(name))]
