"""Golden JSON of every wire model: an old client and a new server must go on understanding it.

A change that breaks one of these files needs a new protocol version and a new file beside it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import graphstash_schema
from graphstash_schema import (
    ArtifactKey,
    Grant,
    LeaseRequest,
    LookupRequest,
    ManifestUpdate,
    NamespacePolicy,
    ReportRequest,
    TokenExchange,
    TokenRequest,
    protocol,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "protocol_1.json").read_text())
PUBLIC = (getattr(graphstash_schema, name) for name in sorted(graphstash_schema.__all__))
MODELS = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, BaseModel)]
REQUESTS = [
    ArtifactKey,
    Grant,
    LeaseRequest,
    LookupRequest,
    ManifestUpdate,
    NamespacePolicy,
    ReportRequest,
    TokenExchange,
    TokenRequest,
]


def golden(model: type[BaseModel]) -> dict[str, Any]:
    return GOLDEN["models"][model.__name__]


@pytest.mark.parametrize("model", MODELS)
def test_the_golden_json_is_read_and_written_unchanged(model):
    read = model.model_validate_json(json.dumps(golden(model)))

    assert json.loads(read.model_dump_json()) == golden(model)


@pytest.mark.parametrize("model", MODELS)
def test_the_golden_json_names_every_field(model):
    assert set(golden(model)) == set(model.model_fields)


@pytest.mark.parametrize("model", [model for model in MODELS if model not in REQUESTS])
def test_an_old_client_reads_what_a_newer_server_adds(model):
    model.model_validate({**golden(model), "new_field": 1})


@pytest.mark.parametrize("model", REQUESTS)
def test_a_request_with_an_unknown_field_is_refused(model):
    with pytest.raises(ValidationError):
        model.model_validate({**golden(model), "new_field": 1})


@pytest.mark.parametrize("model", MODELS)
def test_a_model_cannot_be_changed(model):
    read = model.model_validate_json(json.dumps(golden(model)))

    with pytest.raises(ValidationError):
        setattr(read, next(iter(model.model_fields)), None)


def test_every_model_has_its_golden_json():
    assert set(GOLDEN["models"]) == {model.__name__ for model in MODELS}


def test_names_and_limits_of_the_protocol_do_not_change():
    assert {name: getattr(protocol, name) for name in protocol.__all__} == GOLDEN["protocol"]


def test_error_codes_and_kinds_are_only_ever_added():
    assert set(GOLDEN["error_codes"].items()) <= {
        (code.value, status) for code, status in graphstash_schema.STATUS.items()
    }
    assert set(GOLDEN["kinds"]) <= {kind.value for kind in graphstash_schema.ArtifactKind}
