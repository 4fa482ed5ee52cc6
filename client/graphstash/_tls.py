"""TLS: whom the client believes to be the server, and what it shows of itself.

As with curl, `ca_file` takes the place of the system's certificate authorities; without it the
system's count, and `SSL_CERT_FILE` and `SSL_CERT_DIR` move them.
"""

import ssl
from pathlib import Path

from graphstash._config import ClientConfig
from graphstash._errors import ConfigError

__all__ = ["server_context", "storage_context", "tls_failure"]

_VERIFY_ADVICE = {
    # https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
    9: "it is not valid yet: is this host's clock right?",
    10: "it has expired: renew it, or set this host's clock",
    62: "it is for another host: use the name that it was made for in GRAPHSTASH_URL",
    64: "it is for another address: use the name that it was made for in GRAPHSTASH_URL",
}


def server_context(config: ClientConfig) -> ssl.SSLContext:
    """How the server proves itself to us, and we to it.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = _trusting(config.ca_file, only=True)
    if config.client_cert is not None:
        try:
            # Without a password, OpenSSL would ask for one on the job's terminal.
            context.load_cert_chain(config.client_cert, config.client_key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"GRAPHSTASH_CLIENT_CERT={config.client_cert}, "
                f"GRAPHSTASH_CLIENT_KEY={config.client_key or ''}: {_told(error)}; expected a "
                "certificate and its key in PEM, the key not encrypted"
            ) from None
    return context


def storage_context(config: ClientConfig) -> ssl.SSLContext:
    """For where a server sends us: anybody whom the system or `ca_file` knows; shows nothing.

    Raises:
        ConfigError: the file cannot be used.
    """
    return _trusting(config.ca_file, only=False)


def tls_failure(error: BaseException) -> str | None:
    """What was wrong with TLS and what to do about it; None when something else was wrong."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case None | ssl.SSLEOFError():  # the connection broke, as it may without TLS
            return None
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message):
            advice = _VERIFY_ADVICE.get(
                code, "name the authority that signed it in GRAPHSTASH_CA_FILE"
            )
            return f"the server's certificate is not accepted ({message}): {advice}"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE"):
            return "no TLS is spoken there: does the URL begin with http://?"
        case ssl.SSLError(reason=reason) if "ALERT" in (reason or ""):
            return (
                f"the server does not accept us ({reason}): it may want a certificate of ours, "
                "GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY"
            )
        case _:
            return f"no TLS connection ({_told(cause)})"


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
