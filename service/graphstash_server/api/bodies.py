"""Request bodies: streamed or bounded, and never waited for without end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from graphstash_schema import ErrorCode
from graphstash_server.api.problems import invalid_body
from graphstash_server.errors import ServerError

__all__ = ["body_chunks", "check_key_count", "json_body", "read_model"]

M = TypeVar("M", bound=BaseModel)

_MAX_JSON_BYTES = 2 * 1024**2
"""A manifest update of 4,096 keys has about 1.1 MB."""


async def body_chunks(request: Request, *, idle_seconds: float) -> AsyncIterator[bytes]:
    """The body as it comes in.

    Raises:
        ServerError: 408 when nothing came for too long, 400 when the caller hung up.
    """
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await request.receive()
        except TimeoutError:
            raise ServerError(
                ErrorCode.UPLOAD_TIMEOUT,
                f"no byte came for {idle_seconds:g} seconds: nothing was stored, send it again or "
                "raise GRAPHSTASH_UPLOAD_IDLE_SECONDS on the server",
                limit=idle_seconds,
            ) from None
        if message["type"] == "http.disconnect":
            raise ServerError(ErrorCode.LENGTH_MISMATCH, "the connection ended before the body did")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return


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
