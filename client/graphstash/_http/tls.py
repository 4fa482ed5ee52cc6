"""TLS: which server certificates the client accepts, and which certificate it presents.

As with curl, `ca_file` replaces the system's CA bundle. Without `ca_file`, `SSL_CERT_FILE` and
`SSL_CERT_DIR` can replace the bundle.
"""

import ssl
from pathlib import Path

from graphstash.config import ClientConfig
from graphstash.errors import ConfigError

__all__ = ["server_context", "storage_context", "tls_failure"]

_VERIFY_ADVICE = {
    # https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
    9: "it is not valid yet: check this host's clock",
    10: "it has expired: renew it, or correct this host's clock",
    62: "it is for another host: use the name in the certificate in GRAPHSTASH_URL",
    64: "it is for another address: use the name in the certificate in GRAPHSTASH_URL",
}


def server_context(config: ClientConfig) -> ssl.SSLContext:
    """Return the TLS context for the server, with the client certificate if one is configured.

    Raises:
        ConfigError: a certificate file cannot be used.
    """
    context = _trusting(config.ca_file, only=True)
    if config.client_cert is not None:
        try:
            # Pass a password: without one, OpenSSL would prompt on the job's terminal.
            context.load_cert_chain(config.client_cert, config.client_key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"GRAPHSTASH_CLIENT_CERT={config.client_cert}, "
                f"GRAPHSTASH_CLIENT_KEY={config.client_key or ''}: {_told(error)}; expected a "
                "certificate and its key in PEM, the key not encrypted"
            ) from None
    return context


def storage_context(config: ClientConfig) -> ssl.SSLContext:
    """Return the TLS context for storage that the server redirects to.

    It trusts the system's CAs and `ca_file`, and presents no client certificate.

    Raises:
        ConfigError: the file cannot be used.
    """
    return _trusting(config.ca_file, only=False)


def tls_failure(error: BaseException) -> str | None:
    """Return what failed in TLS and how to fix it, or None for other failures."""
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
            return f"the server's certificate is not accepted ({message}): {advice}"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE"):
            return "the server does not use TLS: use http:// in GRAPHSTASH_URL"
        case ssl.SSLError(reason=reason) if "ALERT" in (reason or ""):
            return (
                f"the server refused the connection ({reason}): it may require a client "
                "certificate, GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY"
            )
        case _:
            return f"the TLS connection failed ({_told(cause)})"


def _trusting(ca_file: Path | None, *, only: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file if only else None)
        if ca_file is not None and not only:
            context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"GRAPHSTASH_CA_FILE={ca_file}: {_told(error)}; expected certificates in PEM"
        ) from None
    return context


def _told(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not in PEM"
    return getattr(error, "strerror", None) or str(error)
