"""Server: name, connection, certificate, protocol, clock, readiness. No request carries a token."""

import json
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, warn
from graphstash._http.connections import TLS, ProcessClient
from graphstash._http.deadline import Deadline
from graphstash._http.errors import message_of, problem_of
from graphstash._http.lean_httpx import httpx
from graphstash._http.sockets import NO_ADDRESS
from graphstash._http.tls import server_context, tls_failure
from graphstash.config import UNIX, ClientConfig
from graphstash_schema.protocol import HEADER_PROTOCOL, PROTOCOL_VERSION
from graphstash_schema.version import __version__

__all__ = ["check_server"]

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


@dataclass(frozen=True, slots=True)
class _Response:
    """A response, unchecked.

    Attributes:
        headers: headers, with case-insensitive names.
        body: first 64 KiB of the body.
        seconds: time from the start of the request to the end of the body.
        at: this host's clock when the headers arrived.
        tls: version of TLS and end of the server's certificate, or None without TLS.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    at: datetime
    tls: tuple[str, datetime] | None


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
            httpx.InvalidURL: the URL of the settings has an invalid host.
        """
        config = self._config
        first_byte_seconds = config.first_byte_seconds + patience_seconds
        deadline = Deadline(config.connect_seconds + config.first_byte_seconds + first_byte_seconds)
        timeout = httpx.Timeout(first_byte_seconds, connect=config.connect_seconds)
        started = monotonic()
        client, _ = self._client.connect()
        with client.stream("GET", path, timeout=timeout, deadline=deadline) as response:
            at = datetime.now(UTC)
            tls = _tls_of(response)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MAX_BYTES:
                    break
        seconds = monotonic() - started
        return _Response(
            response.status_code, response.headers, bytes(body[:_MAX_BYTES]), seconds, at, tls
        )


def check_server(config: ClientConfig) -> Topic[bool]:
    """Check the server. Return whether it answers in this client's protocol."""
    with closing(_Wire(config)) as wire:
        response = yield from _check_protocol(config, wire)
        if response is None:
            return False
        yield from _check_clock(response)
        yield from _check_readiness(wire)
        return True


def _check_protocol(config: ClientConfig, wire: _Wire) -> Topic[_Response | None]:
    try:
        response = wire.get("/healthz")
    except httpx.InvalidURL as error:
        yield fail("connection", f"{config.url}: {error}", "correct GRAPHSTASH_URL")
        return None
    except httpx.HTTPError as error:
        yield _no_answer(config, error)
        return None
    if response.tls is not None:
        yield _lifetime(response.tls)
    spoken = response.headers.get(HEADER_PROTOCOL)
    if spoken is None:
        yield _other_program(config, response)
        return None
    release = _word(response.body, "version")
    if spoken != str(PROTOCOL_VERSION):
        yield fail(
            "server",
            f"graphstash {release} speaks protocol {spoken[:20]}, this client "
            f"({__version__}) speaks {PROTOCOL_VERSION}",
            "install matching releases: upgrade whichever is older",
        )
        return None
    if response.status != 200:
        found, advice = f"GET /healthz answered {response.status}", "see the server's log"
        if response.status == 404 and (path := urlsplit(config.url).path):
            found = f"{config.url}: the server has nothing at the path {path!r}"
            advice = "remove the path from GRAPHSTASH_URL, or let the proxy remove it"
        yield fail("server", found, advice)
        return None
    seconds = response.seconds
    with suppress(httpx.HTTPError):
        # The first request opened the connection. The fastest of three more is the round trip.
        seconds = min(wire.get("/healthz").seconds for _ in range(3))
    text = f"graphstash {release} at {config.url} answers in {seconds * 1000:.1f} ms"
    if seconds > _SLOW_SECONDS:
        yield warn(
            "server",
            text,
            "every download needs a round trip: run a server near the jobs, or keep more on the "
            "disks of the hosts (GRAPHSTASH_LOCAL_LIMIT)",
        )
    else:
        yield ok("server", text)
    return response


def _no_answer(config: ClientConfig, error: httpx.HTTPError) -> Finding:
    place = urlsplit(config.url)
    reason = message_of(error)
    if (failure := tls_failure(error)) is not None:
        what, advice = failure
        return fail("TLS", f"{config.url}: {what}", f"{advice}. {_own_certificate(config)}")
    if isinstance(error, httpx.ConnectTimeout):
        return fail(
            "connection",
            f"{config.url}: no connection within {config.connect_seconds:g} s "
            "(GRAPHSTASH_CONNECT_SECONDS)",
            "a firewall or a network policy drops the packets, or the server is far away: "
            "allow this host, or raise the timeout",
        )
    if isinstance(error, httpx.ConnectError) and reason.endswith(NO_ADDRESS):
        return fail(
            "connection",
            f"{place.hostname} has no address",
            "check the spelling of GRAPHSTASH_URL. If it is right, DNS does not resolve the name "
            f"on this host within GRAPHSTASH_CONNECT_SECONDS ({config.connect_seconds:g}): try "
            f"`getent hosts {place.hostname}`",
        )
    if isinstance(error, httpx.ConnectError):
        return fail(
            "connection",
            f"{config.url}: {reason}",
            "start the server again with `graphstash serve`; only this user may have access to the "
            "directory of its socket"
            if config.url.startswith(UNIX)
            else "start a server there with `graphstash serve`, or set GRAPHSTASH_URL to the URL "
            "of one, e.g. http://cache.internal:8077",
        )
    if isinstance(error, httpx.TimeoutException):
        return fail(
            "server",
            f"{config.url} accepts connections but does not answer within "
            f"{config.first_byte_seconds:g} s (GRAPHSTASH_FIRST_BYTE_SECONDS)",
            "it hangs, is overloaded, or is another program: see its log, and which program uses "
            "the port; raise the timeout for a server that is far away",
        )
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
            f"GET /readyz: {error}",
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


def _word(body: bytes, name: str) -> str:
    with suppress(ValueError, RecursionError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            return str(answer.get(name, "?"))[:200]
    return "?"


def _tls_of(response: httpx.Response) -> tuple[str, datetime] | None:
    connection = response.extensions[TLS]
    if connection is None:
        return None
    ends = ssl.cert_time_to_seconds(connection.getpeercert()["notAfter"])
    return connection.version(), datetime.fromtimestamp(ends, UTC)


def _lifetime(tls: tuple[str, datetime]) -> Finding:
    spoken, ends = tls
    left = ends - datetime.now(UTC)
    found = f"{spoken}; the server's certificate expires in {left.days} days"
    if left < _EXPIRES_SOON:
        return warn(
            "TLS",
            found,
            f"renew it before {ends:%Y-%m-%d}; after that, every job runs without the cache",
        )
    return ok("TLS", found)


def _check_clock(response: _Response) -> Topic[None]:
    try:
        there = parsedate_to_datetime(response.headers.get("Date", ""))
        there = there if there.tzinfo else there.replace(tzinfo=UTC)
    except (TypeError, ValueError):
        yield ok("clock", "skipped: the server's answer has no date")
        return
    seconds = _ahead_seconds(response.at, there, response.seconds)
    side = "ahead of" if seconds > 0 else "behind"
    found = f"this host is {abs(seconds):.0f} s {side} the server"
    advice = "set both clocks by NTP (`timedatectl`): certificates and tokens depend on the time"
    if abs(seconds) > _FAIL_SECONDS:
        yield fail("clock", found, advice)
    elif abs(seconds) > _WARN_SECONDS:
        yield warn("clock", found, advice)
    else:
        yield ok("clock", "this host's and the server's clocks agree")


def _ahead_seconds(here: datetime, there: datetime, trip_seconds: float) -> float:
    """Return how many seconds this host's clock is ahead; negative if it is behind.

    Return 0 if the round trip and the header's resolution of a second may be the cause.
    """
    latest = there + timedelta(seconds=1 + trip_seconds)
    if here > latest:
        return (here - latest).total_seconds()
    return min(0.0, (here - there).total_seconds())
