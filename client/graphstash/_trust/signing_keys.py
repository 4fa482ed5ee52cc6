"""Ed25519 signing keys (RFC 8032), implemented by `cryptography`, which is imported on first use.

Each private key has its own PEM file (PKCS #8), which must be private (see `private_file`).
"""

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import graphstash_schema as schema
from graphstash._trust.private_file import read_private
from graphstash.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from graphstash_schema import SigningKeyId

__all__ = ["SigningKey", "check_available", "is_safe", "is_signed_by"]

_P: Final = 2**255 - 19
"""Prime of the field of edwards25519 (RFC 8032, section 5.1)."""
_D: Final = -121665 * pow(121666, -1, _P) % _P
"""Constant d of the curve -x^2 + y^2 = 1 + d x^2 y^2."""


class SigningKey:
    """An Ed25519 private key.

    Attributes:
        public: the raw public key, 32 bytes.
    """

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @property
    def key_id(self) -> "SigningKeyId":
        """Identifier of the key in signatures."""
        return schema.key_id_of(self.public)

    @property
    def public_text(self) -> str:
        """Public key in the format that `graphstash keys trust` accepts."""
        return base64.urlsafe_b64encode(self.public).rstrip(b"=").decode()

    def sign(self, statement: bytes) -> bytes:
        """Return the 64-byte signature of a statement."""
        return self._private.sign(statement)

    @classmethod
    def generate(cls, path: Path) -> Self:
        """Create a key and write it to a new file.

        Raises:
            ConfigError: the file exists, or writing fails.
        """
        check_available()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        private = Ed25519PrivateKey.generate()
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(pem)
        except FileExistsError:
            raise ConfigError(
                f"signing key {path}: the file exists; choose another path, or remove it if no job "
                "signs with it"
            ) from None
        except OSError as error:
            raise ConfigError(f"signing key {path}: {error.strerror}") from None
        return cls(private)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key from its file.

        Raises:
            ConfigError: other users can access the file, or it holds no unencrypted Ed25519 key.
        """
        check_available()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        pem = read_private(path, "signing key")
        try:
            private = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(
                f"signing key {path}: expected an Ed25519 private key in PEM, not encrypted; "
                "`graphstash keys generate` makes one"
            )
        return cls(private)


def is_signed_by(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Return whether the signature of the statement verifies with a public key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):  # ValueError: the public key is not a point of the curve
        return False
    return True


def is_safe(public: bytes) -> bool:
    """Return whether a public key is a point of the curve that does not have small order.

    For the eight points of small order, anyone can forge signatures without a private key.
    """
    y = (int.from_bytes(public, "little") & (2**255 - 1)) % _P
    for doubling in range(3):  # 8 times a point of small order is the neutral element, y = 1
        y_squared = y * y % _P
        x_squared = (y_squared - 1) * pow(_D * y_squared + 1, -1, _P) % _P
        if doubling == 0 and pow(x_squared, (_P - 1) // 2, _P) == _P - 1:
            return False  # x^2 is not a square, so this is not a point of the curve
        y = (y_squared + x_squared) * pow(1 - _D * x_squared * y_squared, -1, _P) % _P
    return y != 1


def check_available() -> None:
    """Check that `cryptography` is installed.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401 - availability test
    except ImportError as error:
        raise ConfigError(
            f"signatures need the package cryptography ({error}): "
            "pip install 'graphstash[signing] @ git+<repository>', or set "
            "GRAPHSTASH_SIGNATURES=off and no GRAPHSTASH_SIGNING_KEY"
        ) from None
