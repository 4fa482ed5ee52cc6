"""The server against its own OpenAPI document: every call, whoever asks, whatever they send."""

import copy

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.openapi.checks import UndefinedStatusCode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from graphstash_schema import Digest
from graphstash_server.app import create_app
from graphstash_server.settings import Settings

DEVICE = "cpu-x86_64-0123456789abcdef"
KNOWN = {
    "namespace": "described",
    "kind": "jax",
    "device_type": DEVICE,
    "fingerprint": "0" * 64,
    "name": "m",
}
PATH = f"/v1/described/artifacts/jax/{DEVICE}/{'0' * 64}"
KEY = {name: KNOWN[name] for name in ("kind", "device_type", "fingerprint")}
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
)
DOCUMENT = create_app(Settings()).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations()}

pytestmark = pytest.mark.filterwarnings(
    # schemathesis draws from `random` where Hypothesis would rather be asked.
    "ignore::hypothesis.errors.HypothesisDeprecationWarning"
)


@pytest.fixture(scope="module", params=["admin", "reader", "nobody"])
def shown(request, guarded):
    """What a caller shows to a server that asks who they are."""
    _fill(guarded.url, {"Authorization": f"Bearer {guarded.admin}"})
    grants = {"admin": "admin:*", "reader": "read:described"}
    if request.param not in grants:
        return {}
    return {"Authorization": f"Bearer {guarded.token(grants[request.param])}"}


@pytest.fixture(scope="module")
def open_url(live_server):
    _fill(live_server.url, {})
    return live_server.url


def _fill(url, headers):
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
        http.put(PATH, content=b"x", headers={"Repr-Digest": Digest.of(b"x").repr_digest})
        http.put("/v1/described/manifests/m", json={"keys": [KEY]})


def _ask(operation, url, headers, *, examples=5):
    """Asks with good and with bad values, for what exists and for what does not."""
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]

    @seed(1)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)),
        words=st.sampled_from(["known", "drawn", "out of form"]),
    )
    def ask(case, words):
        for name, drawn in case.path_parameters.items():
            if words == "known":
                case.path_parameters[name] = KNOWN.get(name, drawn)
            elif words == "out of form":
                case.path_parameters[name] = "Out of form!"
        answer = case.call(base_url=url, headers=headers, timeout=60)
        case.validate_response(answer, checks=CHECKS, headers=headers)

    ask()


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_of_an_open_server_is_declared(open_url, label):
    _ask(OPERATIONS[label], open_url, {})


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_of_a_guarded_server_is_declared(guarded, shown, label):
    _ask(OPERATIONS[label], guarded.url, shown)


def test_every_call_is_asked():
    asked = {label.split(" ", 1)[1] for label in OPERATIONS}

    assert asked == set(DOCUMENT["paths"])
    assert len(OPERATIONS) == sum(len(methods) for methods in DOCUMENT["paths"].values())


@pytest.mark.parametrize("lacking", ["404", "400"])
def test_an_answer_that_is_not_declared_is_noticed(open_url, lacking):
    """Or the tests above could not fail."""
    path = "/v1/{namespace}/manifests/{name}"
    document = copy.deepcopy(DOCUMENT)
    del document["paths"][path]["get"]["responses"][lacking]

    with pytest.raises((FailureGroup, UndefinedStatusCode), match="status code"):
        _ask(schemathesis.openapi.from_dict(document)[path]["GET"], open_url, {}, examples=50)
