"""Golden JSON of every wire model: an old client and a new server must go on understanding it.

A change that breaks one of these files needs a new protocol version and a new file beside it.
"""

import json
from pathlib import Path

from pydantic import BaseModel

import graphstash_schema
from graphstash_schema import Word, protocol
from graphstash_schema.run import RunName

GOLDEN = json.loads((Path(__file__).parent / "golden" / "protocol_1.json").read_text())
PUBLIC = (getattr(graphstash_schema, name) for name in sorted(graphstash_schema.__all__))
MODELS = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, BaseModel)]
REQUESTS = {
    *("ArtifactKey", "Grant", "LeaseRequest", "LookupRequest", "ManifestUpdate"),
    *("NamespacePolicy", "ReportRequest", "TokenExchange", "TokenRequest"),
}


def test_golden_json_of_every_model_names_its_fields_and_is_read_and_written_unchanged():
    assert set(GOLDEN["models"]) == {model.__name__ for model in MODELS}
    for model in MODELS:
        golden = GOLDEN["models"][model.__name__]
        assert json.loads(model.model_validate_json(json.dumps(golden)).model_dump_json()) == golden
        assert set(golden) == set(model.model_fields), model


def test_unknown_field_of_a_request_is_refused_and_of_a_reply_ignored():
    """An old client reads what a newer server adds."""
    refusing = {each.__name__ for each in MODELS if each.model_config["extra"] == "forbid"}
    ignoring = {each.__name__ for each in MODELS if each.model_config["extra"] == "ignore"}
    assert refusing == REQUESTS
    assert refusing | ignoring == set(GOLDEN["models"])


def test_names_and_limits_of_the_protocol_do_not_change():
    assert {name: getattr(protocol, name) for name in protocol.__all__} == GOLDEN["protocol"]


def test_forms_of_words_do_not_change():
    """A narrower form would refuse names in use, a wider one would not fit into the database."""
    words = {*Word.__subclasses__(), RunName}
    assert {word.__name__: word.form.pattern for word in words} == GOLDEN["words"]


def test_error_codes_and_kinds_are_only_ever_added():
    assert set(GOLDEN["error_codes"].items()) <= {
        (code.value, status) for code, status in graphstash_schema.STATUS.items()
    }
    assert set(GOLDEN["kinds"]) <= {kind.value for kind in graphstash_schema.ArtifactKind}
