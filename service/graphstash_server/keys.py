"""StoredKey: the complete key of an artifact with its namespace, for services and tables."""

from typing import NamedTuple

from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, Fingerprint, Namespace

__all__ = ["StoredKey"]


class StoredKey(NamedTuple):
    """Four validated words. A plain tuple, because it is the key of every table and dictionary."""

    namespace: Namespace
    kind: ArtifactKind
    device_type: DeviceType
    fingerprint: Fingerprint

    @classmethod
    def parse(cls, *, namespace: str, kind: str, device_type: str, fingerprint: str) -> "StoredKey":
        """Parse the path segments of a URL.

        Raises:
            InvalidValueError: a segment is malformed.
        """
        return cls(
            Namespace(namespace),
            ArtifactKind.parse(kind),
            DeviceType(device_type),
            Fingerprint(fingerprint),
        )

    @classmethod
    def of(cls, namespace: Namespace, key: ArtifactKey) -> "StoredKey":
        """Combine a namespace with a key from a request body."""
        return cls(namespace, key.kind, key.device_type, key.fingerprint)

    @property
    def key(self) -> ArtifactKey:
        """The key without its namespace, as in request bodies."""
        return ArtifactKey.model_construct(
            kind=self.kind, device_type=self.device_type, fingerprint=self.fingerprint
        )

    @property
    def json(self) -> str:
        """The key without its namespace as JSON text.

        Responses with many keys use it, because the garbage collector would track and visit an
        object per key. No word contains a character that JSON escapes.
        """
        kind = self.kind._value_  # takes a twentieth of the time of `value`
        return (
            f'{{"kind":"{kind}","device_type":"{self.device_type}",'
            f'"fingerprint":"{self.fingerprint}"}}'
        )

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Values of the primary key, in its order. Transactions lock rows in this order, because
        otherwise two of them could deadlock.
        """
        return self.namespace, self.fingerprint, self.kind.value, self.device_type

    @property
    def artifact_path(self) -> str:
        """URL path of the artifact."""
        return self.key.artifact_path(self.namespace)
