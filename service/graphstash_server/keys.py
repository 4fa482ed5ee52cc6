"""StoredKey: the key of an artifact with its namespace."""

from typing import NamedTuple

from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    DeviceType,
    ErrorCode,
    Fingerprint,
    InvalidValueError,
    Namespace,
)

__all__ = ["StoredKey"]


class StoredKey(NamedTuple):
    """Four validated words. A tuple, because many dictionaries use it as their key."""

    namespace: Namespace
    kind: ArtifactKind
    device_type: DeviceType
    fingerprint: Fingerprint

    @classmethod
    def parse(cls, *, namespace: str, kind: str, device_type: str, fingerprint: str) -> "StoredKey":
        """Parse four texts, or raise InvalidValueError."""
        return cls(
            Namespace(namespace),
            ArtifactKind.parse(kind),
            DeviceType(device_type),
            Fingerprint(fingerprint),
        )

    @classmethod
    def parse_path(cls, text: str) -> "StoredKey":
        """Parse `<namespace>/<kind>/<device type>/<fingerprint>`, or raise InvalidValueError."""
        segments = text.split("/")
        if len(segments) != len(cls._fields):
            raise InvalidValueError(
                code=ErrorCode.INVALID_FINGERPRINT,
                what="artifact",
                value=text,
                expected="<namespace>/<kind>/<device type>/<fingerprint>",
            )
        return cls.parse(**dict(zip(cls._fields, segments, strict=True)))

    @classmethod
    def of(cls, namespace: Namespace, key: ArtifactKey) -> "StoredKey":
        """Combine a namespace with a key."""
        return cls(namespace, key.kind, key.device_type, key.fingerprint)

    @property
    def key(self) -> ArtifactKey:
        """The key without its namespace."""
        return ArtifactKey(self.kind, self.device_type, self.fingerprint)

    @property
    def json(self) -> str:
        """The key without its namespace as JSON. Words need no escapes. A model per key would slow
        down responses with many keys.
        """
        kind = self.kind._value_  # several times as fast as `value`
        return (
            f'{{"kind":"{kind}","device_type":"{self.device_type}",'
            f'"fingerprint":"{self.fingerprint}"}}'
        )

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Values of the primary key. Transactions lock rows in this order to avoid deadlocks."""
        return self.namespace, self.fingerprint, self.kind._value_, self.device_type

    @property
    def artifact_path(self) -> str:
        """URL path of the artifact."""
        return self.key.artifact_path(self.namespace)
