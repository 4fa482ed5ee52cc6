"""Request bodies: streamed or bounded, and never waited for without end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from graphstash_schema import ErrorCode
from graphstash_server.api.problems import invalid_body
from graphstash_server.errors import ServerError

__all__ = [
    "ask_again",
    "ask_again_after",
    "body_chunks",
    "check_key_count",
    "json_body",
    "read_model",
]

M = TypeVar("M", bound=BaseModel)

_MAX_JSON_BYTES = 2 * 1024**2
"""A manifest update of 4,096 keys has about 1.1 MB."""

_MIN_BYTES_PER_SECOND = 8 * 1024
"""Slowest body on average: what a telephone modem brought, far below any network that a cache is
worth using on."""


_ASK_AGAIN = "ask_again"


def ask_again_after(request: Request, question: Callable[[Request], Awaitable[object]]) -> None:
    """Notes what has still to be true when the body has come in, or a wait is over.

    Args:
        request: whose body or wait it is.
        question: is given the request; raises when it is not true any more.
    """
    request.scope["state"][_ASK_AGAIN] = question


async def ask_again(request: Request) -> None:
    """Raises what the question of `ask_again_after` raises."""
    question = request.scope["state"].get(_ASK_AGAIN)
    if question is not None:
        await question(request)


async def body_chunks(request: Request, *, idle_seconds: float) -> AsyncIterator[bytes]:
    """The body as it comes in.

    Only the time that is spent waiting for the caller counts, not the time that its bytes take to
    be stored.

    Args:
        request: whose body it is.
        idle_seconds: the longest time without a byte, and the head start before the average rate
            is looked at.

    Raises:
        ServerError: 408 when nothing came for too long, or too little altogether; 400 when the
            caller hung up; at its end, whatever `ask_again` raises.
    """
    now = asyncio.get_running_loop().time
    allowed_seconds = idle_seconds  # that may still be spent waiting; bytes earn more
    while True:
        began = now()
        try:
            async with asyncio.timeout(min(idle_seconds, allowed_seconds)):
                message = await request.receive()
        except TimeoutError:
            raise _too_slow(idle_seconds, is_idle=allowed_seconds >= idle_seconds) from None
        if message["type"] == "http.disconnect":
            raise ServerError(ErrorCode.LENGTH_MISMATCH, "the connection ended before the body did")
        if message.get("body"):
            allowed_seconds += len(message["body"]) / _MIN_BYTES_PER_SECOND - (now() - began)
            yield message["body"]
        if not message.get("more_body", False):
            await ask_again(request)
            return


def _too_slow(idle_seconds: float, *, is_idle: bool) -> ServerError:
    came = (
        f"no byte came for {idle_seconds:g} seconds"
        if is_idle
        else f"less than {_MIN_BYTES_PER_SECOND} bytes a second came after {idle_seconds:g} seconds"
    )
    return ServerError(
        ErrorCode.UPLOAD_TIMEOUT,
        f"{came}: nothing was stored, send it again or raise GRAPHSTASH_UPLOAD_IDLE_SECONDS on the "
        "server",
        limit=idle_seconds,
    )


async def read_model(request: Request, model: type[M], *, idle_seconds: float) -> M:
    """Reads a JSON body of bounded size. An empty body is an empty object.

    Raises:
        ServerError: 413, 408 or 400.
    """
    raw = bytearray()
    async for chunk in body_chunks(request, idle_seconds=idle_seconds):
        raw += chunk
        if len(raw) > _MAX_JSON_BYTES:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the body has more than {_MAX_JSON_BYTES} bytes: send fewer keys at a time",
                limit=_MAX_JSON_BYTES,
            )
    try:
        return model.model_validate_json(bytes(raw) or b"{}")
    except ValidationError as error:
        raise invalid_body(error) from None


def check_key_count(count: int, *, most: int, way_out: str) -> None:
    """Refuses a body that names no keys, or too many.

    Args:
        count: how many keys it names.
        most: the limit.
        way_out: what the limit is about, and what to do instead.

    Raises:
        ServerError: 400 or 413.
    """
    if not count:
        raise ServerError(ErrorCode.INVALID_REQUEST, f"no keys: expected 1 to {most}", limit=1)
    if count > most:
        raise ServerError(ErrorCode.TOO_MANY_KEYS, f"{count} keys, {way_out}", limit=most)


def json_body(model: type[BaseModel], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """How OpenAPI describes a call that reads its path and its body by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {
        "parameters": parameters,
        "requestBody": {"content": {"application/json": {"schema": schema}}},
    }
