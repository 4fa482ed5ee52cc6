"""Golden JSON of every wire model, which old clients and new servers must continue to accept.

A change that breaks one of these files needs a new protocol version and a new file beside it.
Inside other models, `"$Name"` stands for the JSON of the model `Name`.
"""

import json
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

import graphstash_schema
from graphstash_schema import ArtifactKey, Word, protocol
from graphstash_schema.run import RunName

GOLDEN = json.loads((Path(__file__).parent / "golden" / "protocol_1.json").read_text())
PUBLIC = (getattr(graphstash_schema, name) for name in sorted(graphstash_schema.__all__))
CLASSES = [each for each in PUBLIC if isinstance(each, type)]
MODELS = {
    **{each.__name__: each.model_config for each in CLASSES if issubclass(each, BaseModel)},
    "ArtifactKey": ArtifactKey.__pydantic_config__,
}
REQUESTS = {
    *("ArtifactKey", "Grant", "LeaseRequest", "LookupRequest", "ManifestUpdate"),
    *("NamespacePolicy", "ReportRequest", "TokenExchange", "TokenRequest"),
}


def whole(value):
    """Return the JSON with each `"$Name"` replaced by the JSON of that model."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    is_model = isinstance(value, str) and value.startswith("$")
    return whole(GOLDEN["models"][value[1:]]) if is_model else value


def test_golden_json_of_every_model_names_its_fields_and_is_read_and_written_unchanged():
    assert GOLDEN["models"].keys() == MODELS.keys()
    for name, golden in whole(GOLDEN["models"]).items():
        model = TypeAdapter(getattr(graphstash_schema, name))
        assert json.loads(model.dump_json(model.validate_json(json.dumps(golden)))) == golden
        assert golden.keys() == model.json_schema(by_alias=False)["properties"].keys(), name


def test_unknown_field_of_a_request_is_refused_and_of_a_reply_ignored():
    """An old client must accept a reply to which a newer server has added a field."""
    refusing = {name for name, config in MODELS.items() if config["extra"] == "forbid"}
    ignoring = {name for name, config in MODELS.items() if config["extra"] == "ignore"}
    assert refusing == REQUESTS
    assert refusing | ignoring == set(GOLDEN["models"])


def test_names_and_limits_of_the_protocol_do_not_change():
    assert {name: getattr(protocol, name) for name in protocol.__all__} == GOLDEN["protocol"]


def test_forms_of_words_do_not_change():
    """A narrower form would refuse existing names; a wider form would not fit into the database."""
    words = {*Word.__subclasses__(), RunName}
    assert {word.__name__: word.form.pattern for word in words} == GOLDEN["words"]


def test_error_codes_and_kinds_are_only_ever_added():
    assert set(GOLDEN["error_codes"].items()) <= {
        (code.value, status) for code, status in graphstash_schema.STATUS.items()
    }
    assert set(GOLDEN["kinds"]) <= {kind.value for kind in graphstash_schema.ArtifactKind}
