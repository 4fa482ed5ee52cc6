"""TLS for a server without a proxy.

A process reads the files when it starts. After a renewal, send SIGHUP to a server with several
workers, which replaces them one by one, or restart a server with one process.
"""

import ssl

from graphstash_server.errors import StartError
from graphstash_server.settings import TlsSettings

__all__ = ["tls_context"]


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
