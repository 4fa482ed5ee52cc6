"""Descriptions of artifacts, and the nearest artifacts to a missed one."""

from datetime import timedelta

from fastapi import Response
from pydantic import Field

from graphstash_schema import ErrorCode, Namespace, Scope
from graphstash_schema.explanation import (
    MAX_PARTS_CHARACTERS,
    DescribeRequest,
    Description,
    ExplainResponse,
)
from graphstash_schema.model import WireModel
from graphstash_schema.protocol import API_PREFIX, MAX_DESCRIBE_BYTES
from graphstash_server.api.bodies import parameters_of, read_model, read_query
from graphstash_server.api.calls import KEY_ERRORS, Calls, NamespaceCall, in_namespace, json_answer
from graphstash_server.errors import ServerError
from graphstash_server.services.artifacts.explanations import MAX_NAMESPACES
from graphstash_server.services.namespaces import check_writable

__all__ = ["router"]

router = Calls(prefix=API_PREFIX, tags=["artifacts"])


class _ExplainQuery(WireModel):
    min_age_seconds: float = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="seconds since the start of the run that missed the artifact; younger "
        "artifacts are ignored, because the run itself may have published them",
    )


@router.call(
    "POST",
    "/{namespace}/artifacts:describe",
    needs=in_namespace(Scope.WRITE),
    body=DescribeRequest,
    answers={204: {"description": "stored; earlier descriptions of an artifact stay"}},
    refuses=[*KEY_ERRORS, ErrorCode.READ_ONLY],
)
async def describe_artifacts(call: NamespaceCall) -> Response:
    """Store the inputs of artifacts, so that the server can explain later misses."""
    check_writable(call.namespace, call.policy)  # before the body, which would be in vain
    request = await read_model(call, DescribeRequest, max_bytes=MAX_DESCRIBE_BYTES)
    check_writable(call.namespace, call.policy)  # the policy may have changed meanwhile
    for each in request.artifacts:
        _check(each)
    await call.context.explanations.describe(call.namespace, request.artifacts)
    return Response(status_code=204)


@router.call(
    "POST",
    "/{namespace}/artifacts:explain",
    needs=in_namespace(Scope.READ),
    query=parameters_of(_ExplainQuery),
    body=Description,
    answers={200: {"model": ExplainResponse}},
    refuses=KEY_ERRORS,
)
async def explain_miss(call: NamespaceCall) -> Response:
    """Return the nearest artifacts in all readable namespaces, and how they differ."""
    query = read_query(call, _ExplainQuery)
    missed = await read_model(call, Description, max_bytes=8 * MAX_PARTS_CHARACTERS)
    _check(missed)
    readable, is_partial = await _readable(call)
    explained = await call.context.explanations.explain(
        call.namespace,
        missed,
        readable=readable,
        may_administer=call.principal.may(Scope.ADMIN, call.namespace, call.policy),
        min_age=timedelta(seconds=query.min_age_seconds),
    )
    return json_answer(explained.model_copy(update={"is_partial": is_partial}))


def _check(description: Description) -> None:
    if not description.is_bounded:
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"the parts of {description.key} have more than {MAX_PARTS_CHARACTERS} characters: "
            "send the digests of the largest values in their place",
            limit=MAX_PARTS_CHARACTERS,
        )


async def _readable(call: NamespaceCall) -> tuple[list[Namespace], bool]:
    """Return up to `MAX_NAMESPACES` readable namespaces, and whether there are more."""
    readable = [call.namespace]
    for name in await call.context.policies.namespaces():
        where = Namespace(name)
        if where != call.namespace and await call.may_read(where):
            if len(readable) == MAX_NAMESPACES:
                return readable, True
            readable.append(where)
    return readable, False
