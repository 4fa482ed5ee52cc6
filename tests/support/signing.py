"""Keys of a team, and artifacts as an attacker would publish them."""

import base64
import json
from datetime import UTC, datetime

from graphstash._envelope import seal
from graphstash._keys import SigningKey
from graphstash._proof import Subject
from graphstash._remote import Remote
from graphstash._trust import RevokedKey, TrustedKey, TrustedKeys
from graphstash_schema import ArtifactMetadata, ArtifactSignature, Digest, NamespacePattern

__all__ = ["Team", "flipped", "plant", "sealed", "signature_of", "trust_json"]


class Team:
    """Signing keys by name, and one file of those that are trusted."""

    def __init__(self, directory):
        self.directory = directory
        self.file = directory / "trusted.json"
        TrustedKeys().write(self.file)

    def key(self, name):
        """The key's file; made on first use, trusted by nobody."""
        path = self.directory / f"{name}.pem"
        if not path.exists():
            SigningKey.generate(path)
        return path

    def trust(self, name, *, namespaces=("*",), not_after=None):
        trusted = TrustedKeys.read(self.file)
        key = TrustedKey(
            public=SigningKey.load(self.key(name)).public_text,
            name=name,
            namespaces=tuple(map(NamespacePattern, namespaces)),
            not_after=not_after,
        )
        trusted.model_copy(update={"keys": (*trusted.keys, key)}).write(self.file)
        return self.key(name)

    def revoke(self, name):
        trusted = TrustedKeys.read(self.file)
        key_id = SigningKey.load(self.key(name)).key_id
        revoked = RevokedKey(key_id=key_id, reason="stolen", at=datetime.now(UTC))
        trusted.model_copy(update={"revoked": (*trusted.revoked, revoked)}).write(self.file)


def signature_of(key_file, namespace, key, envelope):
    """What the owner of a key would say of an envelope."""
    signer = SigningKey.load(key_file)
    digest = Digest(envelope.sha256, envelope.size_bytes)
    subject = Subject(namespace, key, digest, envelope.raw_size_bytes)
    value = base64.urlsafe_b64encode(signer.sign(subject.statement(signer.key_id)))
    return ArtifactSignature(key_id=signer.key_id, value=value.rstrip(b"=").decode())


def sealed(directory, key, payload, *, name="planted"):
    """A payload in an envelope that names the key."""
    source = directory / f"{name}.raw"
    source.write_bytes(payload)
    return seal(key, source, directory / name, compile_seconds=30.0)


def plant(config, key, envelope, signature=None):
    """Publishes an envelope as it is."""
    metadata = ArtifactMetadata(
        compile_seconds=30.0, raw_size_bytes=envelope.raw_size_bytes, signature=signature
    )
    remote = Remote(config)
    try:
        remote.upload(key, envelope, metadata)
    finally:
        remote.close()


def flipped(signature):
    """The same signature with one bit changed."""
    value = bytearray(base64.urlsafe_b64decode(signature.value + "=="))
    value[5] ^= 1
    text = base64.urlsafe_b64encode(bytes(value)).rstrip(b"=").decode()
    return ArtifactSignature(key_id=signature.key_id, value=text)


def trust_json(**fields):
    """A file of trusted keys, as somebody would write it by hand."""
    return json.dumps({"version": 1, **fields})
