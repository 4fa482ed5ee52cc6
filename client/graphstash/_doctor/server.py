"""The way to the server and the server itself: name, connection, protocol, readiness."""

import ipaddress
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final
from urllib.parse import urlsplit

import httpx

from graphstash._config import DEFAULT_URL, ClientConfig
from graphstash._doctor.clock import check_clock
from graphstash._doctor.findings import Finding, Topic, fail, ok, warn, within
from graphstash._doctor.tls import check_tls
from graphstash._doctor.wire import Heard, Wire
from graphstash._failures import problem_of
from graphstash._tls import tls_failure
from graphstash_schema.protocol import HEADER_PROTOCOL, PROTOCOL_VERSION

__all__ = ["Way", "check_server"]

_SLOW_SECONDS: Final = 0.1
"""A round trip beyond this is felt: every graph that is fetched costs at least one."""

_READY_PATIENCE_SECONDS: Final = 6.0
"""The server itself gives its probes up to 5 s."""


@dataclass(frozen=True, slots=True)
class Way:
    """A server that answers.

    Attributes:
        is_loopback: whether it is on this host, so that nobody reads along.
    """

    is_loopback: bool


def check_server(config: ClientConfig) -> Topic[Way | None]:
    """Everything up to a server that can serve; None when later questions make no sense."""
    parts = urlsplit(config.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = yield from _check_connection(config, host, port)
    if address is None:
        return None
    if parts.scheme == "https" and not (yield from check_tls(config, host, address, port)):
        return None
    with Wire(config) as wire:
        heard = yield from _check_protocol(config, wire)
        if heard is None:
            return None
        yield from check_clock(heard)
        yield from _check_readiness(wire)
    return Way(is_loopback=_is_loopback(address))


def _check_connection(config: ClientConfig, host: str, port: int) -> Topic[str | None]:
    try:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        address = str(within(config.connect_seconds, look_up)[0][4][0])
    except (OSError, UnicodeError) as error:
        yield fail(
            "connection",
            f"{host} has no address: {_reason(error)}",
            f"is GRAPHSTASH_URL spelled right? If so, this host's DNS does not know it, or not "
            f"within GRAPHSTASH_CONNECT_SECONDS ({config.connect_seconds:g}): try "
            f"`getent hosts {host}`",
        )
        return None
    try:
        socket.create_connection((address, port), timeout=config.connect_seconds).close()
    except TimeoutError:
        yield fail(
            "connection",
            f"{_place(host, address, port)}: no connection within {config.connect_seconds:g} s "
            "(GRAPHSTASH_CONNECT_SECONDS)",
            "something drops the packets, a firewall or a network policy, or the server is far: "
            "let this host through, or allow more seconds",
        )
        return None
    except OSError as error:
        yield fail(
            "connection",
            f"{_place(host, address, port)}: {_reason(error)}",
            "start a server there with `graphstash serve`, or set GRAPHSTASH_URL to the host and "
            "port of one"
            + (f"; without it, it is {DEFAULT_URL}" if config.url == DEFAULT_URL else ""),
        )
        return None
    yield ok("connection", f"{_place(host, address, port)} takes connections")
    return address


def _check_protocol(config: ClientConfig, wire: Wire) -> Topic[Heard | None]:
    try:
        heard = wire.get("/healthz")
    except httpx.HTTPError as error:
        yield _no_answer(config, error)
        return None
    spoken = heard.headers.get(HEADER_PROTOCOL)
    if spoken is None:
        yield _stranger(config, heard)
        return None
    release = _word(heard.body, "version")
    if spoken != str(PROTOCOL_VERSION):
        yield fail(
            "server",
            f"graphstash {release} speaks protocol {spoken[:20]}, this client "
            f"({version('graphstash')}) speaks {PROTOCOL_VERSION}",
            "install matching releases: upgrade whichever is older",
        )
        return None
    if heard.status != 200:
        yield fail(
            "server", f"GET /healthz answered {heard.status}", "the server's log has the reason"
        )
        return None
    seconds = heard.seconds
    with suppress(httpx.HTTPError):
        # The first one opened the connection; the shortest of three more is the way itself.
        seconds = min(wire.get("/healthz").seconds for _ in range(3))
    told = f"graphstash {release} at {config.url} answers in {seconds * 1000:.1f} ms"
    if seconds > _SLOW_SECONDS:
        yield warn(
            "server",
            told,
            "every fetched graph costs a round trip: run a server near the jobs, or let hosts keep "
            "more on their own disk (GRAPHSTASH_LOCAL_LIMIT)",
        )
    else:
        yield ok("server", told)
    return heard


def _no_answer(config: ClientConfig, error: httpx.HTTPError) -> Finding:
    if isinstance(error, httpx.TimeoutException):
        return fail(
            "server",
            f"{config.url} takes connections and does not answer within "
            f"{config.first_byte_seconds:g} s (GRAPHSTASH_FIRST_BYTE_SECONDS)",
            "it hangs, is overloaded, or is something else: look at its log, or whether another "
            "program has the port; for a server that is far, allow more seconds",
        )
    if told := tls_failure(error):
        return fail("TLS", f"{config.url}: {told}", _own_certificate(config))
    hint = (
        f"A server that wants a certificate of ours may hang up, too: {_own_certificate(config)}"
        if config.url.startswith("https:")
        else "A server with TLS wants https:// in GRAPHSTASH_URL"
    )
    return fail(
        "server", f"{config.url} does not speak HTTP: {error}", f"is the port right? {hint}"
    )


def _own_certificate(config: ClientConfig) -> str:
    if config.client_cert is not None:
        return (
            f"is {config.client_cert} (GRAPHSTASH_CLIENT_CERT) of the authority that the server "
            "takes, and has it expired?"
        )
    return (
        "set GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY to the files that your platform team "
        "gave you"
    )


def _stranger(config: ClientConfig, heard: Heard) -> Finding:
    location = heard.headers.get("Location", "")
    if 300 <= heard.status < 400 and location.startswith("https://"):
        home = urlsplit(location)
        return fail(
            "server",
            f"{config.url} sends callers on to {home.scheme}://{home.netloc}, and a client does "
            "not follow",
            f"set GRAPHSTASH_URL={home.scheme}://{home.netloc}",
        )
    if b"SSL certificate" in heard.body:  # nginx says so in HTTP
        return fail(
            "TLS", f"{config.url} takes no client without a certificate", _own_certificate(config)
        )
    if heard.status >= 500:
        return fail(
            "server",
            f"{config.url} answered {heard.status} without {HEADER_PROTOCOL}: a proxy whose server "
            "is gone, most likely",
            "start the server behind it; the proxy's log says which one it asked",
        )
    return fail(
        "server",
        f"{config.url} is not a graphstash server: it answered {heard.status} without "
        f"{HEADER_PROTOCOL}",
        "is the port right? A proxy in between must pass the path on as it is",
    )


def _check_readiness(wire: Wire) -> Topic[None]:
    try:
        heard = wire.get("/readyz", patience_seconds=_READY_PATIENCE_SECONDS)
    except httpx.HTTPError as error:
        yield fail(
            "readiness",
            f"GET /readyz: {_reason(error)}",
            "its database or its blob store hangs: the server's log says which",
        )
        return
    if heard.status != 200:
        problem = problem_of(heard.body)
        yield fail(
            "readiness",
            problem.detail if problem else f"GET /readyz answered {heard.status}",
            "repair what failed, then ask again; until then jobs compile what they need. The "
            "server's log has the reason",
        )
        return
    store = _word(heard.body, "blob_store")
    if store != "ok":
        yield warn(
            "readiness",
            f"blob store {store}: hits are served, nothing new is stored",
            "give the server's disk more room, or lower its --limit-bytes so that it evicts "
            "(`graphstash gc`)",
        )
    else:
        yield ok("readiness", "its database and its blob store work")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _place(host: str, address: str, port: int) -> str:
    return f"{host} port {port}" if host == address else f"{host} ({address}) port {port}"


def _reason(error: BaseException) -> str:
    """The system's words without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _word(body: bytes, name: str) -> str:
    """A word of a JSON answer, for people."""
    with suppress(ValueError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            return str(answer.get(name, "?"))[:200]
    return "?"
