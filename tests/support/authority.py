"""A certificate authority that writes its certificates to files."""

import ssl
from pathlib import Path
from typing import Any

import trustme

from graphstash_server.testing import LiveServer


class Authority:
    """A certificate authority.

    Attributes:
        file: its own certificate.
    """

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, **terms: Any) -> tuple[Path, Path]:
        """Return the files of a new certificate for a name, and of its key."""
        issued = self._ca.issue_cert(name, **terms)
        cert, key = (self._directory / f"{name}.{kind}" for kind in ("pem", "key"))
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def context(self, name: str = "127.0.0.1", **terms: Any) -> ssl.SSLContext:
        """Return the context of a server that shows a new certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(name, **terms))
        return context

    def demanding_context(self) -> ssl.SSLContext:
        """Return the context of a server that requires a certificate of this authority."""
        context = self.context()
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.file)
        return context

    def server(
        self, directory: Path, name: str = "127.0.0.1", *, is_mutual: bool = False, **terms: Any
    ) -> LiveServer:
        """Return a server with a new certificate, which may require one of this authority."""
        cert, key = self.issue(name, **terms)
        return LiveServer(
            directory,
            tls_cert_file=cert,
            tls_key_file=key,
            tls_client_ca_file=self.file if is_mutual else None,
            log_level="error",
        )
