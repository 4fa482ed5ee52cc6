"""Keys of a team, and artifacts as an attacker would publish them."""

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from graphstash import ClientConfig
from graphstash._artifacts.envelope import seal
from graphstash._http.client import ServerClient
from graphstash._trust.policy import SignedSubject
from graphstash._trust.signing_keys import SigningKey
from graphstash._trust.trusted_keys import RevokedKey, TrustedKey, TrustedKeys
from graphstash_schema import (
    ArtifactKey,
    ArtifactMetadata,
    ArtifactSignature,
    Digest,
    Namespace,
    NamespacePattern,
)


@dataclass(frozen=True)
class Sealed:
    path: Path
    sha256: str
    size_bytes: int
    raw_size_bytes: int


class Team:
    """Signing keys by name, and one file of trusted keys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "trusted.json"
        TrustedKeys().write(self.file)

    def key(self, name: str) -> Path:
        """Return the key's file. The key is made on first use and is not trusted yet."""
        path = self.directory / f"{name}.pem"
        if not path.exists():
            SigningKey.generate(path)
        return path

    def trust(
        self, name: str, *, namespaces: Iterable[str] = ("*",), not_after: datetime | None = None
    ) -> Path:
        trusted = TrustedKeys.read(self.file)
        key = TrustedKey(
            public=SigningKey.load(self.key(name)).public_text,
            name=name,
            namespaces=tuple(map(NamespacePattern, namespaces)),
            not_after=not_after,
        )
        trusted.model_copy(update={"keys": (*trusted.keys, key)}).write(self.file)
        return self.key(name)

    def revoke(self, name: str) -> None:
        trusted = TrustedKeys.read(self.file)
        key_id = SigningKey.load(self.key(name)).key_id
        revoked = RevokedKey(key_id=key_id, reason="stolen", at=datetime.now(UTC))
        trusted.model_copy(update={"revoked": (*trusted.revoked, revoked)}).write(self.file)


def signature_of(
    key_file: Path, namespace: Namespace, key: ArtifactKey, envelope: Sealed
) -> ArtifactSignature:
    """Return the signature that the owner of a key would make for an envelope."""
    signer = SigningKey.load(key_file)
    digest = Digest(envelope.sha256, envelope.size_bytes)
    subject = SignedSubject(namespace, key, digest, envelope.raw_size_bytes)
    value = base64.urlsafe_b64encode(signer.sign(subject.statement(signer.key_id)))
    return ArtifactSignature(key_id=signer.key_id, value=value.rstrip(b"=").decode())


def sealed(directory: Path, key: ArtifactKey, payload: bytes, *, name: str = "planted") -> Sealed:
    source = directory / f"{name}.raw"
    source.write_bytes(payload)
    path = directory / name
    with path.open("wb") as file:
        made = seal(key, source, file)
    return Sealed(path, made.sha256, made.size_bytes, made.raw_size_bytes)


def plant(
    config: ClientConfig,
    key: ArtifactKey,
    envelope: Sealed,
    signature: ArtifactSignature | None = None,
) -> None:
    """Publish an envelope unchanged."""
    metadata = ArtifactMetadata(
        compile_seconds=30.0, raw_size_bytes=envelope.raw_size_bytes, signature=signature
    )
    remote = ServerClient(config)
    try:
        with envelope.path.open("rb") as file:
            remote.upload(key, file, Digest(envelope.sha256, envelope.size_bytes), metadata)
    finally:
        remote.close()


def flipped(signature: ArtifactSignature) -> ArtifactSignature:
    value = bytearray(base64.urlsafe_b64decode(signature.value + "=="))
    value[5] ^= 1
    text = base64.urlsafe_b64encode(bytes(value)).rstrip(b"=").decode()
    return ArtifactSignature(key_id=signature.key_id, value=text)


def trust_json(**fields: object) -> str:
    """Return a file of trusted keys, as a user would write it."""
    return json.dumps({"version": 1, **fields})
