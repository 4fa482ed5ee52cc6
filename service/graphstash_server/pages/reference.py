"""The API reference: the OpenAPI document as a page."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["reference_of"]

_METHODS: Final = ("get", "head", "post", "put", "delete")


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter, or a field of a model. `model` is the model in its type, or ""."""

    name: str
    type: str
    model: str
    is_required: bool
    description: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response of a call."""

    status: str
    description: str
    model: str


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A call: one method of a path."""

    id: str
    method: str
    path: str
    description: str
    needs_token: bool
    parameters: list[Field]
    body: str
    body_types: list[str]
    answers: list[Answer]


def reference_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the calls of an OpenAPI document by tag, and its models by name."""
    tags: defaultdict[str, list[ApiCall]] = defaultdict(list)
    for path, calls in document["paths"].items():
        for method in _METHODS:
            if method in calls:
                call = calls[method]
                tags[(call.get("tags") or ["other"])[0]].append(_call(method, path, call))
    schemas = document["components"]["schemas"]
    models = {name: _model(schemas[name]) for name in sorted(schemas)}
    return {"tags": dict(tags), "models": models, "api_version": document["info"]["version"]}


def _call(method: str, path: str, call: Mapping[str, Any]) -> ApiCall:
    content = call.get("requestBody", {}).get("content", {})
    body = next((_type(each.get("schema", {})) for each in content.values()), ("", ""))
    return ApiCall(
        id=call["operationId"],
        method=method.upper(),
        path=path,
        description=call.get("description", ""),
        needs_token=bool(call.get("security")),
        parameters=[
            Field(
                each["name"],
                _type(each["schema"])[0],
                "",
                bool(each.get("required")),
                each.get("description") or each["schema"].get("description", ""),
                each["in"],
            )
            for each in call.get("parameters", [])
        ],
        body=body[1] or body[0],
        body_types=list(content),
        answers=[_answer(status, each) for status, each in sorted(call["responses"].items())],
    )


def _answer(status: str, answer: Mapping[str, Any]) -> Answer:
    content = answer.get("content", {})
    model = next((_type(each.get("schema", {}))[1] for each in content.values()), "")
    return Answer(status, answer.get("description", ""), model)


def _model(schema: Mapping[str, Any]) -> dict[str, Any]:
    required = schema.get("required", [])
    fields = []
    for name, each in schema.get("properties", {}).items():
        written, model = _type(each)
        fields.append(Field(name, written, model, name in required, each.get("description", "")))
    return {
        "description": schema.get("description", ""),
        "fields": fields,
        "values": schema.get("enum", []),
    }


def _type(schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of a type, and the model that it contains, or ""."""
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
