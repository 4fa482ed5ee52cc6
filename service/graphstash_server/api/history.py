"""The history of hits and misses."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Response
from pydantic import AwareDatetime, Field

from graphstash_schema import ErrorCode, Namespace
from graphstash_schema.history import Grouping, History, Step
from graphstash_schema.model import WireModel
from graphstash_schema.protocol import API_PREFIX
from graphstash_server.api.bodies import parameters_of, read_query
from graphstash_server.api.calls import KNOWN, Call, Calls, json_answer

__all__ = ["router"]

router = Calls(tags=["administration"])

Time = Annotated[
    AwareDatetime,
    Field(ge=datetime(2000, 1, 1, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC)),
]


class _HistoryQuery(WireModel):
    since: Time | None = Field(
        default=None,
        description="a time in the first step, such as 2026-01-31T00:00:00Z; default: a day (for "
        "hours) or 30 days (for days) before `until`",
    )
    until: Time | None = Field(
        default=None, description="the last step begins before this time; default: now"
    )
    step: Step = Field(default=Step.HOUR, description="duration of one point")
    by: Grouping = Field(default=Grouping.NONE, description="how to group points besides by time")
    namespace: Namespace | None = Field(default=None, description="count only this namespace")


@router.call(
    "GET",
    API_PREFIX + "/stats/history",
    needs=KNOWN,
    query=parameters_of(_HistoryQuery),
    answers={200: {"model": History}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_NAMESPACE],
)
async def get_history(call: Call) -> Response:
    """Return hits, misses, uploads and savings by hour or day, in all readable namespaces."""
    query = read_query(call, _HistoryQuery)
    history = await call.context.history.read(
        since=query.since,
        until=query.until,
        step=query.step,
        by=query.by,
        namespaces=await _readable(call, query.namespace),
    )
    return json_answer(history)


async def _readable(call: Call, namespace: Namespace | None) -> list[str] | None:
    """Return the requested namespaces that the caller may read, or None for all."""
    if call.principal.may_see_totals:
        return None if namespace is None else [namespace]
    names = await call.context.policies.namespaces() if namespace is None else [namespace]
    return [name for name in names if await call.may_read(Namespace(name))]
