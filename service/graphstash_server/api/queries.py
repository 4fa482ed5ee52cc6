"""Parse the query of a URL into a model."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from graphstash_server.api.calls import Call
from graphstash_server.api.problems import invalid_body

__all__ = ["parameters_of", "read_query"]

M = TypeVar("M", bound=BaseModel)


def parameters_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the fields of a model as OpenAPI query parameters."""
    properties = model.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def read_query(call: Call, model: type[M]) -> M:
    """Parse the query of a request.

    Raises:
        ServerError: 400 for the first invalid parameter.
    """
    try:
        return model.model_validate(dict(call.request.query_params))
    except ValidationError as error:
        raise invalid_body(error) from None
