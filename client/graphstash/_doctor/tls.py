"""TLS: whether this host believes the server's certificate, and for how long yet."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from typing import Final

from graphstash._config import ClientConfig
from graphstash._doctor.findings import Finding, Topic, fail, ok, warn
from graphstash._tls import server_context

__all__ = ["check_tls"]

_EXPIRES_SOON: Final = timedelta(days=14)

# X509_V_ERR_* of OpenSSL, stable since 1.0 (include/openssl/x509_vfy.h).
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_WRONG_NAME: Final = (62, 64)  # host name, IP address


def check_tls(config: ClientConfig, host: str, address: str, port: int) -> Topic[bool]:
    """Whether a job would trust the server at `address` to be `host`."""
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
            "is it a server without TLS? Then GRAPHSTASH_URL begins with http://; else its TLS "
            "versions or ciphers are too old for this Python",
        )
        return False
    except OSError as error:
        yield fail(
            "TLS",
            f"{host} port {port}: no handshake: {error}",
            "is it a server without TLS? Then GRAPHSTASH_URL begins with http://",
        )
        return False
    yield _lifetime(host, spoken, str(certificate.get("notAfter", "")))
    return True


def _lifetime(host: str, spoken: str | None, until: str) -> Finding:
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(until), UTC)
    left = ends - datetime.now(UTC)
    told = f"{spoken}; the certificate of {host} is good for {left.days} more days"
    if left < _EXPIRES_SOON:
        return warn(
            "TLS", told, f"renew it before {ends:%Y-%m-%d}: then every job goes without the cache"
        )
    return ok("TLS", told)


def _advice(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return (
            f"renew the server's certificate; now it is {datetime.now(UTC):%Y-%m-%d %H:%M} UTC "
            "here: if that is wrong, set this host's clock"
        )
    if error.verify_code == _NOT_YET_VALID:
        return (
            f"this host's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: if that is wrong, set "
            "it by NTP (`timedatectl`)"
        )
    if error.verify_code in _WRONG_NAME:
        return (
            f"set GRAPHSTASH_URL to a name that the certificate holds, or have one issued that "
            f"holds {host}"
        )
    return (
        "the authority that signed it is unknown here: set GRAPHSTASH_CA_FILE to its certificate "
        "(PEM); your platform team has it"
    )
