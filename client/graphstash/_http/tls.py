"""TLS: which server certificates the client accepts, and which certificate it presents.

For the server, `ca_file` replaces the system's CA bundle, as with curl. `SSL_CERT_FILE` and
`SSL_CERT_DIR` replace the system's bundle wherever it is used.
"""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from graphstash.config import ClientConfig
from graphstash.errors import ConfigError

__all__ = ["server_context", "storage_context", "tls_failure"]

_VERIFY_ADVICE = {
    # https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
    9: "correct this host's clock, which says {now}",
    10: "renew the server's certificate, or correct this host's clock, which says {now}",
    62: "use a name in the certificate in GRAPHSTASH_URL",
    64: "use a name in the certificate in GRAPHSTASH_URL",
}


def server_context(config: ClientConfig) -> ssl.SSLContext:
    """Return the TLS context for the server, with the client certificate if one is configured.

    Raises:
        ConfigError: a certificate or key file cannot be used.
    """
    context = _context_with(config.ca_file, is_exclusive=True)
    if config.client_cert is not None:
        try:
            # Without a password, OpenSSL would ask for one on the job's terminal.
            context.load_cert_chain(config.client_cert, config.client_key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"GRAPHSTASH_CLIENT_CERT={config.client_cert}, "
                f"GRAPHSTASH_CLIENT_KEY={config.client_key or ''}: {_reason_of(error)}; expected a "
                "certificate and its key in PEM, the key not encrypted"
            ) from None
    return context


def storage_context(config: ClientConfig) -> ssl.SSLContext:
    """Return the TLS context for storage that the server redirects to.

    It trusts the system's CAs and `ca_file`, and presents no client certificate.

    Raises:
        ConfigError: `ca_file` cannot be used.
    """
    return _context_with(config.ca_file, is_exclusive=False)


def tls_failure(error: BaseException) -> tuple[str, str] | None:
    """Return what failed in TLS and how to fix it, or None if TLS did not fail."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case None | ssl.SSLEOFError():  # the connection broke, which also happens without TLS
            return None
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message):
            advice = _VERIFY_ADVICE.get(
                code, "set GRAPHSTASH_CA_FILE to the certificate of the CA that issued it"
            )
            now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
            return f"the server's certificate is not accepted ({message})", advice.format(now=now)
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE"):
            return "the server does not use TLS", "use http:// in GRAPHSTASH_URL"
        case ssl.SSLError(reason=reason) if "ALERT" in (reason or ""):
            variables = "GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY"
            return (
                f"the server refused the connection ({reason})",
                f"it may require a client certificate: set {variables}",
            )
        case _:
            what = f"the TLS connection failed ({_reason_of(cause)})"
            return what, "its TLS versions or ciphers may not fit this Python's"


def _context_with(ca_file: Path | None, *, is_exclusive: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file if is_exclusive else None)
        if ca_file is not None and not is_exclusive:
            context.load_verify_locations(ca_file)
        context.set_alpn_protocols(["http/1.1"])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"GRAPHSTASH_CA_FILE={ca_file}: {_reason_of(error)}; expected certificates in PEM"
        ) from None
    return context


def _reason_of(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not in PEM"
    return getattr(error, "strerror", None) or str(error)
