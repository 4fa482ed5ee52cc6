"""Signing keys: Ed25519 (RFC 8032) by `cryptography`, which is loaded when a key is used.

A private key lies in a file of its own, PEM (PKCS #8), that only its owner may read.
"""

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from graphstash._trust.private_file import read_private
from graphstash.errors import ConfigError
from graphstash_schema import SigningKeyId, key_id_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["SigningKey", "check_available", "is_safe", "is_signed_by"]

_P: Final = 2**255 - 19
"""The field of edwards25519 (RFC 8032, section 5.1)."""
_D: Final = -121665 * pow(121666, -1, _P) % _P
"""Its curve is -x^2 + y^2 = 1 + d x^2 y^2."""


class SigningKey:
    """A private key.

    Attributes:
        public: the raw public key, 32 bytes.
    """

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw()

    @property
    def key_id(self) -> SigningKeyId:
        """What signatures call it."""
        return key_id_of(self.public)

    @property
    def public_text(self) -> str:
        """The public key as `graphstash keys trust` takes it."""
        return base64.urlsafe_b64encode(self.public).rstrip(b"=").decode()

    def sign(self, statement: bytes) -> bytes:
        """64 bytes that prove that whoever has this key said so."""
        return self._private.sign(statement)

    @classmethod
    def generate(cls, path: Path) -> Self:
        """Makes a key and writes it to a new file.

        Raises:
            ConfigError: the file is there already, or the disk refuses.
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
        """Reads a key from its file.

        Raises:
            ConfigError: others may read it, too; or it is not such a key.
        """
        check_available()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        pem = read_private(path, "signing key")
        try:
            private = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # an encrypted one is a TypeError
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(
                f"signing key {path}: expected an Ed25519 private key in PEM, not encrypted; "
                "`graphstash keys generate` makes one"
            )
        return cls(private)


def is_signed_by(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether the owner of a public key has signed the statement."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):  # no point of the curve is a ValueError
        return False
    return True


def is_safe(public: bytes) -> bool:
    """Whether a public key is a point of the curve and not one of the eight of small order.

    A signature of zeros verifies for those, whatever was signed.
    """
    y = (int.from_bytes(public, "little") & (2**255 - 1)) % _P
    for doubling in range(3):  # eight times a point of small order is the neutral element, y = 1
        y_squared = y * y % _P
        x_squared = (y_squared - 1) * pow(_D * y_squared + 1, -1, _P) % _P
        if doubling == 0 and pow(x_squared, (_P - 1) // 2, _P) == _P - 1:
            return False  # no square, so no point of the curve
        y = (y_squared + x_squared) * pow(1 - _D * x_squared * y_squared, -1, _P) % _P
    return y != 1


def check_available() -> None:
    """Makes sure that signatures can be made and checked here.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ConfigError(
            f"signatures need the package cryptography ({error}): "
            "pip install 'graphstash[signing] @ git+<repository>', or set "
            "GRAPHSTASH_SIGNATURES=off and no GRAPHSTASH_SIGNING_KEY"
        ) from None
