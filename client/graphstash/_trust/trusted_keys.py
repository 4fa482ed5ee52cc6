"""Trusted keys: which signing keys the job accepts, in which namespaces, and until when.

`graphstash keys` or an operator writes this JSON file. The client reads it again after a change:

    {"version": 1,
     "keys": [{"public": "<base64url of 32 bytes>", "name": "ci 2026",
               "namespaces": ["trusted", "ci-*"], "not_after": null}],
     "revoked": [{"key_id": "<32 hex digits>", "reason": "stolen", "at": "2026-05-01T00:00Z"}]}

To rotate keys, trust the new key in addition to the old key, sign with the new key, then revoke the
old key. The client rejects all signatures of a revoked key, including earlier signatures.
"""

import base64
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from graphstash._replacing import replacing
from graphstash._trust.file_stamp import file_stamp
from graphstash._trust.signing_keys import is_safe
from graphstash.errors import ConfigError, LocalTierError
from graphstash_schema import Namespace, NamespacePattern, SigningKeyId, key_id_of
from graphstash_schema.model import first_error

__all__ = ["MAX_KEYS", "RevokedKey", "TrustStore", "TrustedKey", "TrustedKeys"]

MAX_KEYS: Final = 1000
"""Maximum number of trusted keys, and of revoked keys."""

_MAX_FILE_BYTES: Final = 1024**2


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TrustedKey(_Record):
    """A key whose signatures are accepted in some namespaces."""

    public: str = Field(
        pattern=r"^[A-Za-z0-9_-]{43}$", description="32 bytes, base64url without padding"
    )
    name: str = Field(default="", max_length=200, description="name of the key, for people")
    namespaces: tuple[NamespacePattern, ...] = Field(
        default=(NamespacePattern("*"),), min_length=1, max_length=64
    )
    not_after: AwareDatetime | None = Field(
        default=None, description="expiry, by this host's clock"
    )

    @field_validator("public")
    @classmethod
    def _check_public(cls, value: str) -> str:
        if not is_safe(base64.urlsafe_b64decode(value + "=")):
            raise ValueError(
                "this is not an Ed25519 public key, or it has a small order, so that anyone can "
                "forge its signatures"
            )
        return value

    @property
    def raw(self) -> bytes:
        """Raw public key, 32 bytes."""
        return base64.urlsafe_b64decode(self.public + "=")

    @property
    def key_id(self) -> SigningKeyId:
        """Identifier of the key in signatures."""
        return key_id_of(self.raw)

    def accepts(self, namespace: Namespace, *, at: datetime) -> bool:
        """Return whether signatures of the key are accepted in a namespace at a point in time."""
        is_current = self.not_after is None or at <= self.not_after
        return is_current and any(pattern.matches(namespace) for pattern in self.namespaces)


class RevokedKey(_Record):
    """A key whose signatures are never accepted."""

    key_id: SigningKeyId
    reason: str = Field(default="", max_length=1000)
    at: AwareDatetime


class TrustedKeys(_Record):
    """Content of the file."""

    version: Literal[1] = 1
    keys: tuple[TrustedKey, ...] = Field(default=(), max_length=MAX_KEYS)
    revoked: tuple[RevokedKey, ...] = Field(default=(), max_length=MAX_KEYS)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and parse the file.

        Raises:
            ConfigError: the file cannot be read or parsed. The message names an invalid field.
        """
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"trusted keys {path}: {error.strerror}") from None
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError(f"trusted keys {path}: more than {_MAX_FILE_BYTES} bytes")
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            what = first_error(error, whole="the file")
            raise ConfigError(
                f"trusted keys {path}: {what}; see `graphstash keys --help`"
            ) from None

    def write(self, path: Path) -> None:
        """Replace the file atomically.

        Raises:
            ConfigError: writing fails.
        """
        text = self.model_dump_json(indent=2) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file holds no secret, and every job on this host may read it.
            with replacing(path, mode=0o644) as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"trusted keys {path}: {error.strerror}") from None


class TrustStore:
    """The current content of the file. Thread-safe.

    Raises:
        ConfigError: on construction, if the file cannot be read or parsed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the fields below
        self._stamp = file_stamp(path)
        self._keys = TrustedKeys.read(path)

    def current(self) -> TrustedKeys:
        """Return the content of the file, and read it again if it has changed.

        Raises:
            LocalTierError: the changed file cannot be read or parsed. Until it is repaired, the job
                accepts no signature.
        """
        with self._lock:
            stamp = file_stamp(self._path)
            if stamp != self._stamp:
                try:
                    self._keys = TrustedKeys.read(self._path)
                except ConfigError as error:
                    raise LocalTierError(str(error)) from None
                self._stamp = stamp
            return self._keys

    def find_revocation(self, key_id: SigningKeyId) -> RevokedKey | None:
        """Return the revocation of a key, or None if the key is not revoked.

        Raises:
            LocalTierError: as for `current`.
        """
        return next((each for each in self.current().revoked if each.key_id == key_id), None)

    def public_key(self, key_id: SigningKeyId, namespace: Namespace) -> bytes | None:
        """Return a trusted key's raw bytes, or None if it is not accepted in the namespace.

        Raises:
            LocalTierError: as for `current`.
        """
        at = datetime.now(UTC)
        for key in self.current().keys:
            if key.key_id == key_id and key.accepts(namespace, at=at):
                return key.raw
        return None
