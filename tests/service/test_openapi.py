"""The server follows its own OpenAPI document for every call, caller and input."""

import copy

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from graphstash_schema import Digest
from graphstash_server.app import create_app
from graphstash_server.settings import Settings
from support.deferred import Deferred

# Importing schemathesis takes seconds, so pytest's options disable its plugin, and only the tests
# below import it.
schemathesis = Deferred("schemathesis")
server_checks = Deferred("schemathesis.checks")
checks = Deferred("schemathesis.specs.openapi.checks")
failures = Deferred("schemathesis.core.failures")

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
DOCUMENT = create_app(Settings()).openapi()

pytestmark = pytest.mark.filterwarnings(
    # schemathesis uses `random` in a way that Hypothesis deprecates.
    "ignore::hypothesis.errors.HypothesisDeprecationWarning"
)


@pytest.fixture(scope="module")
def callers(guarded, live_server):
    """Pairs of a server's URL and a caller's headers, beginning with an administrator."""
    admin, reader = (
        {"Authorization": f"Bearer {token}"}
        for token in (guarded.admin, guarded.token("read:described"))
    )
    _fill(guarded.url, admin)
    _fill(live_server.url, {})
    return [(guarded.url, shown) for shown in (admin, reader, {})] + [(live_server.url, {})]


def _fill(url, headers):
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
        http.put(PATH, content=b"x", headers={"Repr-Digest": Digest.of(b"x").repr_digest})
        http.put("/v1/described/manifests/m", json={"keys": [KEY]})


def _ask(operation, callers, words, *, examples):
    """Send valid and invalid values. Words of the path exist, are drawn, or are malformed."""
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    every_check = (
        server_checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.response_headers_conformance,
    )

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
        caller=st.sampled_from(callers),
    )
    def ask(case, caller):
        for name, drawn in case.path_parameters.items():
            if words == "known":
                case.path_parameters[name] = KNOWN.get(name, drawn)
            elif words == "out of form":
                case.path_parameters[name] = "Out of form!"
        url, headers = caller
        answer = case.call(base_url=url, headers=headers, timeout=60)
        case.validate_response(answer, checks=every_check, headers=headers)

    ask()


@pytest.fixture(scope="module")
def schema():
    return schemathesis.openapi.from_dict(DOCUMENT)


@pytest.mark.parametrize(
    ("path", "method"),
    [(path, method) for path, calls in DOCUMENT["paths"].items() for method in calls],
)
def test_every_answer_is_declared(callers, schema, path, method, is_extended):
    asking = callers if is_extended else callers[:1]
    for words in ("known", "drawn", "out of form"):
        _ask(schema[path][method], asking, words, examples=4 if is_extended else 2)


def test_undeclared_answer_is_detected(callers):
    """Control for the previous test."""
    path = "/v1/{namespace}/manifests/{name}"
    document = copy.deepcopy(DOCUMENT)
    del document["paths"][path]["get"]["responses"]["404"]
    operation = schemathesis.openapi.from_dict(document)[path]["GET"]

    with pytest.raises((failures.FailureGroup, checks.UndefinedStatusCode), match="status code"):
        _ask(operation, callers[:1], "drawn", examples=10)
