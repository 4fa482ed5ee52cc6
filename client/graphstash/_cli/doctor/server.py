"""Server: name, connection, certificate, protocol, clock, readiness. No request carries a token."""

import ipaddress
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

import httpx

from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, warn, within
from graphstash._http.deadline import Deadline, ProcessClient
from graphstash._http.errors import problem_of
from graphstash._http.tls import server_context, tls_failure
from graphstash.config import UNIX, ClientConfig
from graphstash_schema.protocol import HEADER_PROTOCOL, PROTOCOL_VERSION

__all__ = ["ReachedServer", "check_server"]

_SLOW_SECONDS: Final = 0.1
"""Seconds of a round trip above which to warn: every download needs at least one."""

_READY_PATIENCE_SECONDS: Final = 6.0
"""Extra seconds to wait for readiness: the server probes its stores for up to 5 s."""

_MAX_BYTES: Final = 64 * 1024
"""Maximum bytes to read of a body. Health and readiness have less than 1 KiB."""

_WARN_SECONDS: Final = 5.0
_FAIL_SECONDS: Final = 60.0
"""Differences of clocks. Certificates, tokens and JWTs tolerate seconds, not minutes."""

_EXPIRES_SOON: Final = timedelta(days=14)

# X509_V_ERR_* of OpenSSL, unchanged since 1.0 (include/openssl/x509_vfy.h).
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_WRONG_NAME: Final = (62, 64)  # host name, IP address


@dataclass(frozen=True, slots=True)
class ReachedServer:
    """A server that answers in this client's protocol.

    Attributes:
        is_loopback: whether the server is on this host, so that no network carries the traffic.
    """

    is_loopback: bool


@dataclass(frozen=True, slots=True)
class _Response:
    """A response, unchecked.

    Attributes:
        headers: headers, with case-insensitive names.
        body: first 64 KiB of the body.
        seconds: time from the start of the request to the end of the body.
        at: this host's clock when the headers arrived.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    at: datetime


class _Wire:
    """Sends requests without a token."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        is_tls = config.url.startswith("https:")
        self._client = ProcessClient(
            config.url,
            context=lambda: server_context(config) if is_tls else None,
            headers={HEADER_PROTOCOL: str(PROTOCOL_VERSION), "User-Agent": "graphstash-doctor"},
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, *, patience_seconds: float = 0.0) -> _Response:
        """Send a GET with the timeouts of a job, and `patience_seconds` more.

        Raises:
            httpx.HTTPError: no complete response arrived in time.
        """
        config = self._config
        first_byte_seconds = config.first_byte_seconds + patience_seconds
        deadline = Deadline(config.connect_seconds + config.first_byte_seconds + first_byte_seconds)
        timeout = httpx.Timeout(first_byte_seconds, connect=config.connect_seconds)
        started = monotonic()
        client, transport = self._client.connected()
        with transport.within(deadline), client.stream("GET", path, timeout=timeout) as response:
            at = datetime.now(UTC)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MAX_BYTES:
                    break
        seconds = monotonic() - started
        return _Response(
            response.status_code, response.headers, bytes(body[:_MAX_BYTES]), seconds, at
        )


def check_server(config: ClientConfig) -> Topic[ReachedServer | None]:
    """Check the server. Return None if it does not answer in this client's protocol."""
    if config.url.startswith(UNIX):
        with closing(_Wire(config)) as wire:
            return (yield from _check_answers(config, wire, is_loopback=True))
    parts = urlsplit(config.url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = yield from _check_connection(config, host, port)
    if address is None:
        return None
    if parts.scheme == "https" and not (yield from _check_tls(config, host, address, port)):
        return None
    with closing(_Wire(config)) as wire:
        return (yield from _check_answers(config, wire, is_loopback=_is_loopback(address)))


def _check_answers(
    config: ClientConfig, wire: _Wire, *, is_loopback: bool
) -> Topic[ReachedServer | None]:
    response = yield from _check_protocol(config, wire)
    if response is None:
        return None
    yield from _check_clock(response)
    yield from _check_readiness(wire)
    return ReachedServer(is_loopback=is_loopback)


def _check_connection(config: ClientConfig, host: str, port: int) -> Topic[str | None]:
    try:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = within(config.connect_seconds, look_up)
    except (OSError, UnicodeError) as error:
        yield fail(
            "connection",
            f"{host} has no address: {_reason(error)}",
            f"check the spelling of GRAPHSTASH_URL. If it is right, DNS does not resolve the name "
            f"on this host within GRAPHSTASH_CONNECT_SECONDS ({config.connect_seconds:g}): try "
            f"`getent hosts {host}`",
        )
        return None
    addresses: dict[int, str] = {}
    for family, *_, place in found:
        addresses.setdefault(family, str(place[0]))
    failures: dict[str, Finding] = {}
    for address in addresses.values():  # like the client: one of each family
        where = _place(host, address, port)
        try:
            socket.create_connection((address, port), timeout=config.connect_seconds).close()
        except TimeoutError:
            failures[address] = fail(
                "connection",
                f"{where}: no connection within {config.connect_seconds:g} s "
                "(GRAPHSTASH_CONNECT_SECONDS)",
                "a firewall or a network policy drops the packets, or the server is far away: "
                "allow this host, or raise the timeout",
            )
        except OSError as error:
            failures[address] = fail(
                "connection",
                f"{where}: {_reason(error)}",
                "start a server there with `graphstash serve`, or set GRAPHSTASH_URL to the "
                "URL of one, e.g. http://cache.internal:8077",
            )
        else:
            unlike = f", unlike {', '.join(failures)}" if failures else ""
            yield ok("connection", f"{where} accepts connections{unlike}")
            return address
    yield from failures.values()
    return None


def _check_protocol(config: ClientConfig, wire: _Wire) -> Topic[_Response | None]:
    try:
        response = wire.get("/healthz")
    except httpx.HTTPError as error:
        yield _no_answer(config, error)
        return None
    spoken = response.headers.get(HEADER_PROTOCOL)
    if spoken is None:
        yield _other_program(config, response)
        return None
    release = _word(response.body, "version")
    if spoken != str(PROTOCOL_VERSION):
        yield fail(
            "server",
            f"graphstash {release} speaks protocol {spoken[:20]}, this client "
            f"({version('graphstash')}) speaks {PROTOCOL_VERSION}",
            "install matching releases: upgrade whichever is older",
        )
        return None
    if response.status != 200:
        yield fail("server", f"GET /healthz answered {response.status}", "see the server's log")
        return None
    seconds = response.seconds
    with suppress(httpx.HTTPError):
        # The first request opened the connection. The fastest of three more is the round trip.
        seconds = min(wire.get("/healthz").seconds for _ in range(3))
    told = f"graphstash {release} at {config.url} answers in {seconds * 1000:.1f} ms"
    if seconds > _SLOW_SECONDS:
        yield warn(
            "server",
            told,
            "every download needs a round trip: run a server near the jobs, or keep more on the "
            "disks of the hosts (GRAPHSTASH_LOCAL_LIMIT)",
        )
    else:
        yield ok("server", told)
    return response


def _no_answer(config: ClientConfig, error: httpx.HTTPError) -> Finding:
    if config.url.startswith(UNIX) and isinstance(error, httpx.ConnectError):
        return fail(
            "connection",
            f"{config.url}: {error}",
            "start the server again with `graphstash serve`; only this user may have access to the "
            "directory of its socket",
        )
    if isinstance(error, httpx.TimeoutException):
        return fail(
            "server",
            f"{config.url} accepts connections but does not answer within "
            f"{config.first_byte_seconds:g} s (GRAPHSTASH_FIRST_BYTE_SECONDS)",
            "it hangs, is overloaded, or is another program: see its log, and which program uses "
            "the port; raise the timeout for a server that is far away",
        )
    if told := tls_failure(error):
        return fail("TLS", f"{config.url}: {told}", _own_certificate(config))
    hint = (
        f"A server that requires a client certificate may also hang up: {_own_certificate(config)}"
        if config.url.startswith("https:")
        else "A server with TLS needs https:// in GRAPHSTASH_URL"
    )
    return fail("server", f"{config.url} does not speak HTTP: {error}", f"check the port. {hint}")


def _own_certificate(config: ClientConfig) -> str:
    if config.client_cert is not None:
        return (
            f"check that a CA which the server trusts issued {config.client_cert} "
            "(GRAPHSTASH_CLIENT_CERT), and that it has not expired"
        )
    return (
        "set GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY to the files from your platform team"
    )


def _other_program(config: ClientConfig, response: _Response) -> Finding:
    location = response.headers.get("Location", "")
    if 300 <= response.status < 400 and location.startswith("https://"):
        home = urlsplit(location)
        return fail(
            "server",
            f"{config.url} redirects to {home.scheme}://{home.netloc}, which clients do not follow",
            f"set GRAPHSTASH_URL={home.scheme}://{home.netloc}",
        )
    if b"SSL certificate" in response.body:  # nginx's error page
        return fail("TLS", f"{config.url} requires a client certificate", _own_certificate(config))
    if response.status >= 500:
        return fail(
            "server",
            f"{config.url} answered {response.status} without {HEADER_PROTOCOL}: probably a proxy "
            "whose server is down",
            "start the server behind it; the proxy's log names it",
        )
    return fail(
        "server",
        f"{config.url} is not a graphstash server: it answered {response.status} without "
        f"{HEADER_PROTOCOL}",
        "check the port. A proxy must not change the path",
    )


def _check_readiness(wire: _Wire) -> Topic[None]:
    try:
        response = wire.get("/readyz", patience_seconds=_READY_PATIENCE_SECONDS)
    except httpx.HTTPError as error:
        yield fail(
            "readiness",
            f"GET /readyz: {_reason(error)}",
            "its database or its blob store hangs; see the server's log",
        )
        return
    if response.status != 200:
        problem = problem_of(response.body)
        yield fail(
            "readiness",
            problem.detail if problem else f"GET /readyz answered {response.status}",
            "repair what failed; until then jobs compile what they need. See the server's log",
        )
        return
    store = _word(response.body, "blob_store")
    clock = _word(response.body, "clock")
    limit = _word(response.body, "store_limit")
    if clock not in ("ok", "?"):  # earlier servers report no clock
        yield warn("readiness", clock, "correct the clock of the server's host or database")
    elif limit not in ("ok", "?"):
        yield warn(
            "readiness",
            limit.partition(". ")[0],
            "raise the limit, or evict with `graphstash gc --evict-now` and the server's "
            "GRAPHSTASH_* variables. Until then the server may refuse uploads",
        )
    elif store != "ok":
        yield warn(
            "readiness",
            f"blob store {store}: hits are served, nothing new is stored",
            "free space on the server's disk, or lower its --limit-bytes so that it evicts "
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
    """Return the system's error text without `[Errno N]`."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _word(body: bytes, name: str) -> str:
    with suppress(ValueError, RecursionError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            return str(answer.get(name, "?"))[:200]
    return "?"


def _check_tls(config: ClientConfig, host: str, address: str, port: int) -> Topic[bool]:
    """Return whether a job would accept the certificate of the server at `address` for `host`."""
    try:
        with socket.create_connection((address, port), config.connect_seconds) as plain:
            plain.settimeout(config.first_byte_seconds)
            with server_context(config).wrap_socket(plain, server_hostname=host) as secured:
                certificate = secured.getpeercert() or {}
                spoken = secured.version()
    except ssl.SSLCertVerificationError as error:
        yield fail("TLS", f"{host}: {error.verify_message}", _advice(error, host))
        return False
    except ssl.SSLError as error:
        yield fail(
            "TLS",
            f"{host} port {port} does not speak TLS with this client: {error.reason or error}",
            "use http:// in GRAPHSTASH_URL for a server without TLS; otherwise its TLS versions or "
            "ciphers are too old for this Python",
        )
        return False
    except OSError as error:
        yield fail(
            "TLS",
            f"{host} port {port}: no handshake: {error}",
            "use http:// in GRAPHSTASH_URL for a server without TLS",
        )
        return False
    yield _lifetime(host, spoken, str(certificate.get("notAfter", "")))
    return True


def _lifetime(host: str, spoken: str | None, until: str) -> Finding:
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(until), UTC)
    left = ends - datetime.now(UTC)
    told = f"{spoken}; the certificate of {host} expires in {left.days} days"
    if left < _EXPIRES_SOON:
        return warn(
            "TLS",
            told,
            f"renew it before {ends:%Y-%m-%d}; after that, every job runs without the cache",
        )
    return ok("TLS", told)


def _advice(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return (
            f"renew the server's certificate. This host's clock says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: if that is wrong, correct it"
        )
    if error.verify_code == _NOT_YET_VALID:
        return (
            f"this host's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: if that is wrong, "
            "set it by NTP (`timedatectl`)"
        )
    if error.verify_code in _WRONG_NAME:
        return f"set GRAPHSTASH_URL to a name in the certificate, or get a certificate for {host}"
    return (
        "the CA that issued it is not trusted here: set GRAPHSTASH_CA_FILE to the CA's certificate "
        "(PEM) from your platform team"
    )


def _check_clock(response: _Response) -> Iterator[Finding]:
    try:
        told = parsedate_to_datetime(response.headers.get("Date", ""))
        told = told if told.tzinfo else told.replace(tzinfo=UTC)
    except (TypeError, ValueError):
        yield ok("clock", "skipped: the server's answer has no date")
        return
    seconds = _ahead_seconds(response.at, told, response.seconds)
    side = "ahead of" if seconds > 0 else "behind"
    found = f"this host is {abs(seconds):.0f} s {side} the server"
    advice = "set both clocks by NTP (`timedatectl`): certificates and tokens depend on the time"
    if abs(seconds) > _FAIL_SECONDS:
        yield fail("clock", found, advice)
    elif abs(seconds) > _WARN_SECONDS:
        yield warn("clock", found, advice)
    else:
        yield ok("clock", "this host's and the server's clocks agree")


def _ahead_seconds(here: datetime, told: datetime, trip_seconds: float) -> float:
    """Return how many seconds this host's clock is ahead; negative if it is behind.

    Return 0 if the round trip and the header's resolution of a second may be the cause.
    """
    latest = told + timedelta(seconds=1 + trip_seconds)
    if here > latest:
        return (here - latest).total_seconds()
    return min(0.0, (here - told).total_seconds())
