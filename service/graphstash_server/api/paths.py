"""What the calls take from their path.

The calls read the path by themselves instead of declaring parameters: the words check their own
form, and FastAPI's own checks cost a third of a small hit.
"""

from typing import Any, Final

from fastapi import Request

from graphstash_schema import DeviceType, Fingerprint, ManifestName, Namespace, Word
from graphstash_schema.fingerprint import ArtifactKind
from graphstash_server.keys import StoredKey

__all__ = [
    "IN_KEY",
    "IN_MANIFEST",
    "IN_NAMESPACE",
    "KEY",
    "key_of",
    "manifest_of",
    "named_namespace",
    "namespace_of",
]

KEY: Final = "{kind}/{device_type}/{fingerprint}"
"""The path segments of a key."""


def named_namespace(request: Request) -> str:
    """The namespace as it stands in the path: not checked yet."""
    named: str = request.path_params["namespace"]
    return named


def namespace_of(request: Request) -> Namespace:
    """The namespace of the path.

    Raises:
        InvalidValueError: when it is out of form.
    """
    return Namespace(request.path_params["namespace"])


def key_of(request: Request) -> StoredKey:
    """The whole key of the path.

    Raises:
        InvalidValueError: for the first segment that is out of form.
    """
    return StoredKey.parse(**request.path_params)


def manifest_of(request: Request) -> ManifestName:
    """The name of the manifest.

    Raises:
        InvalidValueError: when it is out of form.
    """
    return ManifestName(request.path_params["name"])


def _described(name: str, word: type[Word]) -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{word.form.pattern}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


IN_NAMESPACE: Final = [_described("namespace", Namespace)]
"""OpenAPI parameters of a path with a namespace."""

IN_KEY: Final = [
    *IN_NAMESPACE,
    {
        "name": "kind",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": [kind.value for kind in ArtifactKind]},
    },
    _described("device_type", DeviceType),
    _described("fingerprint", Fingerprint),
]
"""OpenAPI parameters of a path with a key."""

IN_MANIFEST: Final = [*IN_NAMESPACE, _described("name", ManifestName)]
"""OpenAPI parameters of a path with a manifest."""
