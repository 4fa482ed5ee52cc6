"""TLS for a server without a proxy.

A process reads the files when it starts. After a renewal, send SIGHUP to a server with several
workers, which replaces them one by one, or restart a server with one process.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from graphstash_server.errors import StartError
from graphstash_server.logs import in_background
from graphstash_server.settings import TlsSettings

__all__ = ["Handshakes", "tls_context"]


class Handshakes:
    """TLS handshakes of one listener. Beyond the limit, a new one ends the oldest one, because
    handshakes take milliseconds unless the caller is silent.

    Args:
        context: TLS context of the listener.
        connect: returns the protocol of a connection whose handshake is complete.
        seconds: time limit of a handshake.
        most: maximum number of handshakes.
        count_refusal: called for each handshake that the limit ends.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        connect: Callable[[], asyncio.BaseProtocol],
        *,
        seconds: float,
        most: int,
        count_refusal: Callable[[], None],
    ) -> None:
        self._context = context
        self._connect = connect
        self._seconds = seconds
        self._most = most
        self._count_refusal = count_refusal
        self._running: dict[socket.socket, None] = {}

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a connection that the listener has accepted."""
        return _Accepted(self)

    def begin(self, connection: socket.socket) -> None:
        """Begin the handshake of a connection."""
        self._running[connection] = None
        if len(self._running) > self._most:
            oldest = next(iter(self._running))
            del self._running[oldest]
            self._count_refusal()
            with suppress(OSError):  # the caller has closed it
                oldest.shutdown(socket.SHUT_RDWR)
        in_background(self._run(connection))

    async def _run(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._seconds,
            )
        except OSError:  # a failed handshake, which closes the connection
            connection.close()
        finally:
            self._running.pop(connection, None)


class _Accepted(asyncio.Protocol):
    """Passes the socket of a new connection on before the event loop reads from it."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = transport.get_extra_info("socket")
        try:
            connection = socket.socket(fileno=os.dup(accepted.fileno()))
        except OSError:  # no free descriptor, or the caller has closed the connection
            return
        finally:
            transport.abort()  # type: ignore[attr-defined] # a transport of a stream
        connection.setblocking(False)
        self._handshakes.begin(connection)


def tls_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the port, or None for plain HTTP.

    Accepts TLS 1.2 or later with Python's default ciphers, and HTTP/1.1. With a CA for clients,
    each client must present a certificate.

    Raises:
        StartError: a file cannot be read or has the wrong content.
    """
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise StartError(
            f"the certificate {certificate} and the key {key} cannot be used: {_reason(error)}; "
            "both must be PEM files that the server can read, and the key must not have a password"
        ) from None
    authorities = settings.tls_client_ca_file
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except (OSError, ValueError) as error:
            raise StartError(
                f"the clients' CA file {authorities} cannot be used: {_reason(error)}; it must "
                "be a PEM file with certificates"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """Raise instead of prompting for a password, which would block an unattended server."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).partition(" (_ssl")[0]
