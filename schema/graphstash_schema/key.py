"""ArtifactKey: what an artifact is found by."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from graphstash_schema.device import DeviceType
from graphstash_schema.fingerprint import ArtifactKind, Fingerprint
from graphstash_schema.names import Namespace
from graphstash_schema.protocol import API_PREFIX

__all__ = ["ArtifactKey"]


class ArtifactKey(BaseModel):
    """Names an artifact inside a namespace; the URL or the client supplies the namespace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[ArtifactKind, BeforeValidator(ArtifactKind.parse)]
    device_type: DeviceType
    fingerprint: Fingerprint

    @classmethod
    def parse(cls, kind: str, device_type: str, fingerprint: str) -> "ArtifactKey":
        """Reads the three path segments.

        Raises:
            InvalidValueError: for the first part that is out of form.
        """
        return ArtifactKey.model_construct(
            kind=ArtifactKind.parse(kind),
            device_type=DeviceType(device_type),
            fingerprint=Fingerprint(fingerprint),
        )

    def __str__(self) -> str:
        return f"{self.kind}/{self.device_type}/{self.fingerprint}"

    def artifact_path(self, namespace: Namespace) -> str:
        """The URL path of the artifact."""
        return f"{API_PREFIX}/{namespace}/artifacts/{self}"

    def lease_path(self, namespace: Namespace) -> str:
        """The URL path of the right to compile the artifact."""
        return f"{API_PREFIX}/{namespace}/leases/{self}"
