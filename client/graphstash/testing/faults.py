"""Exchange: one request to the server, which can pass it on or fail it as a test requests."""

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash.testing.failures import Call, Failure, ServerCall
from graphstash_schema import (
    STATUS,
    ArtifactKey,
    ErrorCode,
    InvalidValueError,
    Namespace,
    Problem,
    ReportRequest,
)
from graphstash_schema.protocol import (
    ADMIN_PREFIX,
    API_PREFIX,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    PROBLEM_MEDIA_TYPE,
    PROTOCOL_VERSION,
)

__all__ = ["Exchange"]

_POLL_SECONDS: Final = 0.05
"""Seconds between checks of whether a hanging call may continue."""

_CODES: Final = {
    **{status: code for code, status in reversed(STATUS.items())},
    400: ErrorCode.INVALID_REQUEST,
    404: ErrorCode.NOT_FOUND,
    503: ErrorCode.UNAVAILABLE,
}
"""Error code of each status that the server sends. Other statuses come only from proxies."""

_KEY: Final = "(?P<kind>[^/]+)/(?P<device_type>[^/]+)/(?P<fingerprint>[^/]+)"
_IN_NAMESPACE: Final = f"{API_PREFIX}/(?P<namespace>[^/]+)"
_CALLS: Final[Mapping[str, Mapping[str, ServerCall]]] = {
    "/healthz": {"GET": "health"},
    "/readyz": {"GET": "ready"},
    f"{API_PREFIX}/stats": {"GET": "stats"},
    f"{ADMIN_PREFIX}/access": {"GET": "access"},
    f"{_IN_NAMESPACE}/artifacts/{_KEY}": {
        "GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete",
    },
    f"{_IN_NAMESPACE}/artifacts:lookup": {"POST": "lookup"},
    f"{_IN_NAMESPACE}/artifacts:verify": {"POST": "verify"},
    f"{_IN_NAMESPACE}/artifacts:report": {"POST": "report"},
    f"{_IN_NAMESPACE}/withdrawals": {"GET": "list_withdrawals"},
    f"{_IN_NAMESPACE}/leases/{_KEY}": {"POST": "acquire", "PUT": "renew", "DELETE": "release"},
    f"{_IN_NAMESPACE}/manifests/[^/]+": {"GET": "get_manifest", "PUT": "put_manifest"},
    f"{_IN_NAMESPACE}/runs": {"GET": "list_runs"},
    f"{_IN_NAMESPACE}/runs/[^/]+": {"GET": "get_run"},
    f"{_IN_NAMESPACE}/runs/[^/]+/[^/]+": {"PUT": "put_run"},
}  # fmt: skip


@dataclass
class Exchange:
    """A request that uvicorn has begun to receive: an ASGI call and its connection."""

    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    transport: Any

    async def call(self) -> Call | None:
        """Return the call, or None if the server will refuse the request as malformed."""
        groups: Mapping[str, str] = {}
        operation: ServerCall = "other"
        for pattern, operations in _CALLS.items():
            if match := re.fullmatch(pattern, self.scope["path"]):
                operation = operations.get(self.scope["method"], "other")
                groups = match.groupdict()
        key = None
        try:
            namespace = Namespace(groups["namespace"]) if "namespace" in groups else None
            if "fingerprint" in groups:
                key = ArtifactKey.parse(
                    groups["kind"], groups["device_type"], groups["fingerprint"]
                )
            elif operation == "verify":
                key = TypeAdapter(ArtifactKey).validate_json(await self.body())
            elif operation == "report":
                key = ReportRequest.model_validate_json(await self.body()).key
        except (InvalidValueError, ValidationError):
            return None
        headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in self._headers}
        return Call(operation, namespace, key, headers)

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = self.scope["headers"]
        return headers

    def replace_header(self, old: bytes, new: bytes) -> None:
        """Set headers with one value to another."""
        self.scope["headers"] = [
            (name, new if value == old else value) for name, value in self._headers
        ]

    async def body(self) -> bytes:
        """Return the whole body. The application can still receive it."""
        body = b""
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await self.receive()
            body += message.get("body", b"")
        self._give_back({**message, "body": body})
        return body

    async def answer(self) -> None:
        """Let the application respond."""
        await self.app(self.scope, self.receive, self.send)

    async def fail(self, failure: Failure, *, is_closing: Callable[[], bool]) -> None:
        """Fail the call. Handles every fault except `wrong_artifact`."""
        await self.body()
        if failure.fault is None:
            await self.refuse(failure.status, "FakeServer.fail_on")
        elif failure.fault == "stranger":
            await self._send(200, b"<html></html>", {"Content-Type": "text/html"})
        elif failure.fault == "reset":
            await self._reset()
        elif failure.fault == "hang":
            await (self.answer() if await self._is_over(failure, is_closing) else self._reset())
        else:
            await self._damage(is_cut=failure.fault == "truncate")

    async def refuse(self, status: int, detail: str) -> None:
        """Send an error response, with a problem document if the server sends this status."""
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        body = b""
        if (code := _CODES.get(status)) is not None:
            problem = Problem.of(code, detail, request_id="fake")
            status, body = problem.status, problem.model_dump_json(exclude_none=True).encode()
            headers["Content-Type"] = PROBLEM_MEDIA_TYPE
        headers |= {HEADER_PROTOCOL: str(PROTOCOL_VERSION), HEADER_REQUEST_ID: "fake"}
        await self._send(status, body, headers)

    async def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        sent = {**headers, "Content-Length": str(len(body))}
        pairs = [(name.lower().encode(), text.encode()) for name, text in sent.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})

    async def _reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
        await self._until_gone()

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _is_over(self, failure: Failure, is_closing: Callable[[], bool]) -> bool:
        """Wait until the failure ends. Return False if the client or the server ends first."""
        message = await self.receive()
        gone = asyncio.ensure_future(self._until_gone())
        try:
            while not (failure.is_removed() or gone.done() or is_closing()):
                await asyncio.wait({gone}, timeout=_POLL_SECONDS)
        finally:
            gone.cancel()
        self._give_back(message)
        return failure.is_removed()

    def _give_back(self, message: Message) -> None:
        rest, receive = [message], self.receive

        async def again() -> Message:
            return rest.pop() if rest else await receive()

        self.receive = again

    async def _damage(self, *, is_cut: bool) -> None:
        """Flip a bit in the middle of the response's body, or close the connection there."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self.app({**self.scope, "extensions": {}}, self.receive, keep)
        body = b"".join(message.get("body", b"") for message in messages)
        middle = len(body) // 2
        await self.send(messages[0])
        if is_cut and body:
            await self.send({**messages[1], "body": body[:middle], "more_body": True})
            self.transport.close()
            await self._until_gone()
            return
        if body:
            body = body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :]
        await self.send({"type": "http.response.body", "body": body})
