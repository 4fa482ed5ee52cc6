"""Reports of runs."""

from typing import Final

from fastapi import Request, Response

from graphstash_schema import ErrorCode, Namespace, Scope
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.run import (
    MAX_RUN_BYTES,
    Run,
    RunList,
    RunName,
    RunQuery,
    RunReport,
    RunTimes,
)
from graphstash_server.api.bodies import parameters_of, read_model, read_query
from graphstash_server.api.calls import KEY_ERRORS, Calls, NamespaceCall, in_namespace, json_answer
from graphstash_server.errors import ServerError

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["runs"])

_PATH: Final = "/{namespace}/runs"


def _hidden(request: Request) -> ServerError:
    """Return the same error for a run that the caller may not read as for an absent run."""
    return _absent(Namespace(request.path_params["namespace"]), RunName(request.path_params["run"]))


@router.call(
    "PUT",
    _PATH + "/{run}/{process}",
    needs=in_namespace(Scope.READ),
    query=parameters_of(RunTimes),
    body=RunReport,
    answers={204: {"description": "stored, in place of what the process reported before"}},
    refuses=[*KEY_ERRORS, ErrorCode.CONFLICT, ErrorCode.INSUFFICIENT_STORAGE],
)
async def put_report(call: NamespaceCall) -> Response:
    """Store the report of one process of a run so far. Any caller that may read the namespace
    may report. A run belongs to its first reporter.
    """
    words = call.request.path_params
    run, process = RunName(words["run"]), RunName(words["process"])
    times = read_query(call, RunTimes)
    report = await read_model(call, RunReport, max_bytes=MAX_RUN_BYTES)
    await call.context.runs.put(
        call.namespace, run, process, report, times, writer=call.principal.party
    )
    return Response(status_code=204)


@router.call(
    "GET",
    _PATH,
    needs=in_namespace(Scope.READ),
    query=parameters_of(RunQuery),
    answers={200: {"model": RunList}},
    refuses=[ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_NAME],
)
async def list_runs(call: NamespaceCall) -> Response:
    """Return the runs that reported last, without their misses."""
    query = read_query(call, RunQuery)
    return json_answer(await call.context.runs.list_latest(call.namespace, query))


@router.call(
    "GET",
    _PATH + "/{run}",
    needs=in_namespace(Scope.READ, absent=_hidden),
    answers={200: {"model": Run}},
)
async def get_run(call: NamespaceCall) -> Response:
    """Return one run with its misses."""
    name = RunName(call.request.path_params["run"])
    run = await call.context.runs.find(call.namespace, name)
    if run is None:
        raise _absent(call.namespace, name)
    return json_answer(run)


def _absent(where: Namespace, run: RunName) -> ServerError:
    return ServerError(
        ErrorCode.NOT_FOUND, f"there is no report of a run {run} in namespace {where}"
    )
