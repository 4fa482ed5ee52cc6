"""StoredKey: the whole key of an artifact, with its namespace, as services and tables use it."""

from typing import NamedTuple

from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, Fingerprint, Namespace

__all__ = ["StoredKey"]


class StoredKey(NamedTuple):
    """Four checked words; a plain tuple because it is the key of every table and dictionary."""

    namespace: Namespace
    kind: ArtifactKind
    device_type: DeviceType
    fingerprint: Fingerprint

    @classmethod
    def parse(cls, *, namespace: str, kind: str, device_type: str, fingerprint: str) -> "StoredKey":
        """Reads the path segments of a URL.

        Raises:
            InvalidValueError: for the first segment that is out of form.
        """
        return cls(
            Namespace(namespace),
            ArtifactKind.parse(kind),
            DeviceType(device_type),
            Fingerprint(fingerprint),
        )

    @classmethod
    def of(cls, namespace: Namespace, key: ArtifactKey) -> "StoredKey":
        """Joins a namespace and a key that came in a body."""
        return cls(namespace, key.kind, key.device_type, key.fingerprint)

    @property
    def key(self) -> ArtifactKey:
        """The key without its namespace, as it stands in bodies."""
        return ArtifactKey.model_construct(
            kind=self.kind, device_type=self.device_type, fingerprint=self.fingerprint
        )

    @property
    def json(self) -> str:
        """The same as it is written in JSON, for answers with many keys: objects for each would be
        counted, and visited, by the garbage collector. No word has a character that JSON escapes.
        """
        kind = self.kind._value_  # a twentieth of the time of `value`
        return (
            f'{{"kind":"{kind}","device_type":"{self.device_type}",'
            f'"fingerprint":"{self.fingerprint}"}}'
        )

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """The values of the primary key, in its order. Transactions lock rows in this order, or two
        of them could wait for each other.
        """
        return self.namespace, self.fingerprint, self.kind.value, self.device_type

    @property
    def artifact_path(self) -> str:
        """The URL path of the artifact."""
        return self.key.artifact_path(self.namespace)
