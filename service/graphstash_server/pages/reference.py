"""The API reference: the OpenAPI document as a page."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["reference_of"]

_METHODS: Final = ("get", "head", "post", "put", "delete")


def reference_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the calls of an OpenAPI document by tag, and its models by name. `type_of` returns the
    text of a schema's type, and the model that it contains, or "".
    """
    tags: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for path, calls in document["paths"].items():
        for method in _METHODS:
            if method in calls:
                call = calls[method]
                named = {**call, "method": method.upper(), "path": path}
                tags[(call.get("tags") or ["other"])[0]].append(named)
    return {
        "tags": dict(tags),
        "models": dict(sorted(document["components"]["schemas"].items())),
        "api_version": document["info"]["version"],
        "type_of": _type,
    }


def _type(schema: Mapping[str, Any]) -> tuple[str, str]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return name, name
    if "anyOf" in schema:
        found = [_type(each) for each in schema["anyOf"]]
        return " or ".join(each[0] for each in found), next((m for _, m in found if m), "")
    if schema.get("type") == "array":
        written, model = _type(schema.get("items", {}))
        return f"list of {written}", model
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"])), ""
    written = str(schema.get("type", "any"))
    limits = [
        f"{word} {schema[name]:,}" if isinstance(schema[name], int) else f"{word} {schema[name]:g}"
        for word, name in (
            ("≥", "minimum"),
            (">", "exclusiveMinimum"),
            ("≤", "maximum"),
            ("at most characters:", "maxLength"),
        )
        if name in schema
    ]
    if "format" in schema:
        written = str(schema["format"])
    return ", ".join([written, *limits]), ""
