"""HTTP server: accept connections, route paths, and send or inject failures into responses."""

import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel

from graphstash.testing.exchange import Answer, RefusalError, Request, problem_answer
from graphstash.testing.failures import Call, Failure, Fault, ServerCall
from graphstash.testing.store import POLL_SECONDS, Store
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

__all__ = ["CLOSE_SECONDS", "HttpServer"]

_MAX_JSON_BYTES: Final = 2 * 1024**2
CLOSE_SECONDS: Final = 10.0
"""Seconds that `close` waits for each thread."""

_CODES: Final = {
    **{status: code for code, status in reversed(STATUS.items())},
    400: ErrorCode.INVALID_REQUEST,
    404: ErrorCode.NOT_FOUND,
}
"""Error code for each status that `fail_on` accepts."""

_KEY: Final = "(?P<kind>[^/]+)/(?P<device_type>[^/]+)/(?P<fingerprint>[^/]+)"
_IN_NAMESPACE: Final = f"{API_PREFIX}/(?P<namespace>[^/]+)"
_ROUTES: Final[Mapping[str, Mapping[str, ServerCall]]] = {
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
    f"{_IN_NAMESPACE}/leases/{_KEY}": {"POST": "acquire", "PUT": "renew", "DELETE": "release"},
    f"{_IN_NAMESPACE}/manifests/(?P<name>[^/]+)": {"GET": "get_manifest", "PUT": "put_manifest"},
    f"{_IN_NAMESPACE}/runs": {"GET": "list_runs"},
    f"{_IN_NAMESPACE}/runs/(?P<run>[^/]+)": {"GET": "get_run"},
    f"{_IN_NAMESPACE}/runs/(?P<run>[^/]+)/(?P<process>[^/]+)": {"PUT": "put_run"},
}  # fmt: skip

_STRANGER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"
)


class HttpServer(ThreadingHTTPServer):
    """HTTP server that tracks its threads, so that `close` can wait for them."""

    request_queue_size = 128

    def __init__(
        self, store: Store, *, token: str | None, record: Callable[[Call], Failure | None]
    ) -> None:
        self.store = store
        self.token = token
        self.record = record
        self._serving: list[tuple[socket.socket, threading.Thread]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread."""
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        self._serving = [each for each in self._serving if each[1].is_alive()]
        self._serving.append((request, thread))
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: test clients disconnect on purpose, and `FakeServer.calls` lists the
        calls.
        """

    def close(self) -> None:
        """Close the listener and every connection, and wait for their threads."""
        with suppress(OSError):
            # A forked process may also hold the listener, so closing alone does not end it.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for connection, thread in self._serving:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(CLOSE_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    """Serves one connection: answers requests or injects failures."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def log_message(self, *_: Any) -> None:
        """Print nothing: tests read `FakeServer.calls`."""

    def do_GET(self) -> None:
        fault: Fault | None = None
        try:
            request = self._read()
            namespace, key = request.where
            call = Call(request.operation, namespace or None, key, request.headers)
            failure = self.server.record(call)
            if failure is not None:
                fault = failure.fault
                if fault is None:
                    self._send(_failed(failure))
                    return
                if self._ends_without_answer(failure):
                    return
            self._check(request)
            if fault == "wrong_artifact" and request.operation == "get":
                request = replace(request, where=self.server.store.instead_of(request.where))
            answer = self.server.store.answer(request)
        except (RefusalError, InvalidValueError) as refusal:
            answer = problem_answer(refusal)
        self._send(answer, fault=fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815 - http.server's names

    def _read(self) -> Request:
        """Read the request with its body, so that the connection can serve the next request."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body(headers)
        target = urlsplit(self.path)
        operation, words = _route(self.command, target.path)
        key: Any = None
        if "fingerprint" in words:
            key = ArtifactKey.parse(words["kind"], words["device_type"], words["fingerprint"])
        namespace = Namespace(words["namespace"]) if "namespace" in words else ""
        request = Request(
            operation,
            (namespace, key),  # type: ignore[arg-type] # both are set for artifact calls
            words,
            target.query,
            headers,
            body,
            self._is_gone,
        )
        if operation == "verify":
            key = request.parse(ArtifactKey)
        if operation == "report":
            key = request.parse(ReportRequest).key
        return replace(request, where=(request.where[0], key))

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        is_upload = self.command == "PUT" and "/artifacts/" in self.path
        length = headers.get("content-length", "" if is_upload else "0")
        limit = self.server.store.max_bytes if is_upload else _MAX_JSON_BYTES
        body = b""
        if "transfer-encoding" in headers or not length.isdecimal():
            refusal = RefusalError(ErrorCode.LENGTH_REQUIRED, "Content-Length is missing")
        elif int(length) > limit:
            refusal = RefusalError(ErrorCode.TOO_LARGE, f"the body has more than {limit} bytes")
        elif len(body := self.rfile.read(int(length))) == int(length):
            return body
        else:
            refusal = RefusalError(ErrorCode.LENGTH_MISMATCH, "the connection ended in the body")
        self.close_connection = True
        raise refusal

    def _check(self, request: Request) -> None:
        """Refuse an unsupported protocol version, and a client without the token."""
        version = request.headers.get(HEADER_PROTOCOL.lower(), str(PROTOCOL_VERSION))
        if version != str(PROTOCOL_VERSION):
            raise RefusalError(
                ErrorCode.UNSUPPORTED_PROTOCOL, f"protocol version {version!r} is not supported"
            )
        token = self.server.token
        is_open = token is None or request.operation in {"health", "ready"}
        if not is_open and request.headers.get("authorization") != f"Bearer {token}":
            raise RefusalError(
                ErrorCode.UNAUTHENTICATED, "authentication required: set GRAPHSTASH_TOKEN"
            )

    def _ends_without_answer(self, failure: Failure) -> bool:
        """Inject `hang`, `reset` or `stranger`. Return whether the call needs no response."""
        if failure.fault == "hang":
            while not failure.is_removed(within_seconds=POLL_SECONDS):
                if self._has_ended():
                    return True
        elif failure.fault == "reset":
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())  # `close` would wait for the socket's file objects
        elif failure.fault == "stranger":
            self.close_connection = True
            self.wfile.write(_STRANGER)
        return failure.fault in {"reset", "stranger"}

    def _send(self, answer: Answer, *, fault: Fault | None = None) -> None:
        body, headers = answer.body or b"", dict(answer.headers)
        if isinstance(body, BaseModel):
            is_problem = isinstance(body, Problem)
            headers["Content-Type"] = PROBLEM_MEDIA_TYPE if is_problem else "application/json"
            body = body.model_dump_json(exclude_none=True).encode()
        headers |= {HEADER_PROTOCOL: str(PROTOCOL_VERSION), HEADER_REQUEST_ID: "fake"}
        if answer.status != 204:
            headers["Content-Length"] = str(len(body))
        if self.command == "HEAD":
            body = b""
        if fault == "flip" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :]
        if fault == "truncate" and body:
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.close_connection:
            headers["Connection"] = "close"
        lines = [f"HTTP/1.1 {answer.status} {responses.get(answer.status, 'Failed')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def _has_ended(self) -> bool:
        self.close_connection |= self.server.store.is_closed or self._is_gone()
        return self.close_connection

    def _is_gone(self) -> bool:
        try:
            seen: bytes = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return seen == b""


def _route(method: str, path: str) -> tuple[ServerCall, dict[str, str]]:
    for pattern, operations in _ROUTES.items():
        if match := re.fullmatch(pattern, path):
            if method not in operations:
                allowed = ", ".join(operations)
                raise RefusalError(ErrorCode.METHOD_NOT_ALLOWED, f"{path}: use {allowed}")
            return operations[method], match.groupdict()
    raise RefusalError(ErrorCode.UNKNOWN_PATH, f"unknown path {path}")


def _failed(failure: Failure) -> Answer:
    """Return an error response. Statuses that only a proxy sends have no problem document."""
    code = _CODES.get(failure.status)
    answer = Answer(failure.status)
    if code is not None:
        answer = problem_answer(RefusalError(code, "FakeServer.fail_on"))
    is_busy = failure.status in (429, 503)
    return replace(answer, headers={**answer.headers, "Retry-After": "1"}) if is_busy else answer
