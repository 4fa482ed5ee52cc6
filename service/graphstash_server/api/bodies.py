"""Read what a request contains: its body, as a stream or as JSON of bounded size and always with
time limits, or the query of its URL.
"""

import asyncio
from collections.abc import AsyncIterator, Hashable
from dataclasses import fields
from functools import cache
from typing import Any, Final, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.types import Message

from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    DeviceType,
    ErrorCode,
    Fingerprint,
    InvalidValueError,
    LookupRequest,
    ManifestUpdate,
    Namespace,
)
from graphstash_server.api.calls import Call, NamespaceCall
from graphstash_server.api.problems import invalid_body
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = [
    "body_chunks",
    "parameters_of",
    "read_keys",
    "read_model",
    "read_query",
]

M = TypeVar("M")

_MAX_JSON_BYTES = 32 * 1024
"""Maximum bytes of a JSON body without keys. The largest has about 13 KiB: a token with all
its grants."""

_MAX_KEY_BYTES = 512
"""Maximum bytes per key in a JSON body. The longest key has 300 bytes without indentation."""

_MIN_BYTES_PER_SECOND = 8 * 1024
"""Minimum average rate of a body: the rate of a telephone modem, on which a cache is useless."""


async def body_chunks(request: Request, *, idle_seconds: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives.

    The limits count only the time that this function waits for bytes, not the time to store them.
    `idle_seconds` limits the wait for the next byte. The sum of all waits may exceed the time that
    the received bytes take at the minimum average rate by at most `idle_seconds`.

    Raises:
        ServerError: 408 if no bytes or too few arrive in time, 400 if the connection ends early.
    """
    now = asyncio.get_running_loop().time
    allowed_seconds = idle_seconds  # remaining wait; each received byte extends it
    while True:
        began = now()
        try:
            message = await _receive(request, min(idle_seconds, allowed_seconds))
        except TimeoutError:
            raise _too_slow(idle_seconds, is_idle=allowed_seconds >= idle_seconds) from None
        if message["type"] == "http.disconnect":
            raise ServerError(ErrorCode.LENGTH_MISMATCH, "the connection ended before the body did")
        if message.get("body"):
            allowed_seconds += len(message["body"]) / _MIN_BYTES_PER_SECOND - (now() - began)
            yield message["body"]
        if not message.get("more_body", False):
            return


async def _receive(request: Request, seconds: float) -> Message:
    """Return the next message, which may have arrived in time while the event loop was stalled.

    Raises:
        TimeoutError: no message arrived.
    """
    try:
        async with asyncio.timeout(seconds):
            return await request.receive()
    except TimeoutError:
        # The event loop polls the connection in its next turn, but runs this task first.
        for _ in range(2):
            await asyncio.sleep(0)
        async with asyncio.timeout(0):
            return await request.receive()


def _too_slow(idle_seconds: float, *, is_idle: bool) -> ServerError:
    cause = (
        f"no byte arrived for {idle_seconds:g} seconds"
        if is_idle
        else f"fewer than {_MIN_BYTES_PER_SECOND} bytes/s arrived after {idle_seconds:g} seconds"
    )
    return ServerError(
        ErrorCode.UPLOAD_TIMEOUT,
        f"{cause}: nothing was stored, retry or raise GRAPHSTASH_UPLOAD_IDLE_SECONDS on the server",
        limit=idle_seconds,
    )


async def read_model(
    call: Call,
    model: type[M],
    *,
    max_bytes: int = _MAX_JSON_BYTES,
) -> M:
    """Read a JSON body of bounded size. An empty body counts as `{}`. Then reauthorize the call,
    because the token may have been revoked while the body arrived.

    Raises:
        ServerError: 413, 408 or 400, and the errors of `Call.reauthorize`.
    """
    return _parse(await _read_json(call, max_bytes=max_bytes), model)


async def read_keys(
    call: NamespaceCall,
    model: type[LookupRequest | ManifestUpdate],
    *,
    max_keys: int,
    advice: str,
) -> list[StoredKey]:
    """Read a body that is a list of keys. A valid body is parsed without the model, which
    is several times as fast. For an invalid body, the model reports the error.

    The parser builds all values and errors of a body before it fails. That takes a thousand times
    as long as reading the body. So `max_keys` is checked before parsing. `advice` completes the
    error message about too many keys.
    """
    raw = await _read_json(call, max_bytes=max_keys * _MAX_KEY_BYTES)
    if (count := _count_keys(raw)) > max_keys:
        raise ServerError(ErrorCode.TOO_MANY_KEYS, f"{count} keys, {advice}", limit=max_keys)
    keys = _plain_keys(raw, call.namespace, max_keys=max_keys)
    if keys is None:
        keys = [StoredKey.of(call.namespace, key) for key in _parse(raw, model).keys]
    return keys


def _plain_keys(raw: bytes, namespace: Namespace, *, max_keys: int) -> list[StoredKey] | None:
    """Return the keys of a valid body. None: parse the body with the model."""
    kinds, device_types = _KINDS, _DeviceTypes()
    try:
        body = from_json(raw)
        items = body["keys"]
        if len(body) != 1 or not 1 <= len(items) <= max_keys:
            return None
        if any(len(item) != _FIELDS for item in items):
            return None
        return [
            StoredKey(
                namespace,
                kinds[item["kind"]],
                device_types[item["device_type"]],
                Fingerprint(item["fingerprint"]),
            )
            for item in items
        ]
    except (ValueError, TypeError, KeyError, InvalidValueError):
        return None


class _DeviceTypes(dict[str, DeviceType]):
    """Parses each distinct device type of a body once. Most bodies have only one."""

    def __missing__(self, text: str) -> DeviceType:
        self[text] = device_type = DeviceType(text)
        return device_type


_KINDS: Final = {kind.value: kind for kind in ArtifactKind}
_FIELDS: Final = len(fields(ArtifactKey))


async def _read_json(call: Call, *, max_bytes: int) -> bytes:
    if int(call.request.headers.get("content-length", 0)) > max_bytes:
        raise ServerError(
            ErrorCode.TOO_LARGE,
            f"the body is larger than {max_bytes} bytes, the limit of this call: send less",
            limit=max_bytes,
        )
    raw = bytearray()
    idle_seconds = call.context.settings.upload_idle_seconds
    async for chunk in body_chunks(call.request, idle_seconds=idle_seconds):
        raw += chunk
    await call.reauthorize()
    return bytes(raw) or b"{}"


def _parse(raw: bytes, model: type[M]) -> M:
    try:
        parsed: M = _adapter(cast("Hashable", model)).validate_json(raw)
    except ValidationError as error:
        raise invalid_body(error) from None
    return parsed


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _count_keys(raw: bytes) -> int:
    """Return the number of keys in a list of keys, or about a quarter of the values in other JSON.

    In JSON, each value or pair except the first follows a comma, `{` or `[`. A valid body of n keys
    has 4n + 1 of these characters, because its strings contain none.
    """
    return (sum(map(raw.count, (b",", b"{", b"["))) + 2) // 4


def parameters_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the fields of a model as OpenAPI query parameters."""
    properties = model.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def read_query(call: Call, model: type[M]) -> M:
    """Parse the query of a request.

    Raises:
        ServerError: 400 for the first invalid parameter.
    """
    try:
        parsed: M = _adapter(cast("Hashable", model)).validate_python(
            dict(call.request.query_params)
        )
    except ValidationError as error:
        raise invalid_body(error) from None
    return parsed
