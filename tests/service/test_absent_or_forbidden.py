"""Who has no right learns nothing: what is there is answered as what is not."""

import json

import pytest

from graphstash_schema import Digest
from graphstash_server.app import create_app
from graphstash_server.settings import Settings
from support.guarded_server import DEVICE, artifact_path, fingerprint

PATHS = create_app(Settings()).openapi()["paths"]
CALLS = [(method.upper(), path) for path in PATHS if "{" in path for method in PATHS[path]]


def key(number):
    return {"kind": "jax", "device_type": DEVICE, "fingerprint": fingerprint(number)}


def filled(path, *, namespace, number):
    """A path with words, and a body that every call takes for something of its own."""
    words = {
        "namespace": namespace,
        "name": f"manifest-{number}",
        "id": "a" * 16,
        "token_id": "a" * 16,
        "run": f"run-{number}",
        "process": "p0",
    }
    for name, value in (words | key(number)).items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path, path
    return path


def body_of(path, number):
    if path.endswith((":lookup", "/{name}")):
        return {"keys": [key(number)]}
    if path.endswith(":verify"):
        return key(number)
    if path.endswith(":report"):
        digest = str(Digest.of(b"secret"))
        return {"key": key(number), "digest": digest, "reason": "corrupt"}
    return {}


@pytest.fixture(scope="module")
def kept(guarded):
    """A namespace with an artifact, a manifest and a run, 1; and nothing that is called 2."""
    admin = guarded.http(guarded.admin)
    digest = {"Repr-Digest": Digest.of(b"secret").repr_digest}
    stored = admin.put(artifact_path("kept", 1), content=b"secret", headers=digest)
    assert stored.status_code in {200, 201}
    manifest = "/v1/kept/manifests/manifest-1"
    assert admin.put(manifest, json={"keys": [key(1)]}).status_code in {200, 201}
    report = {"started_at": "2026-01-01T00:00:00Z", "seconds": 1}
    assert admin.put("/v1/kept/runs/run-1/p0", json=report).status_code == 204
    guarded.set_policy("kept", mode="read_only", limit_bytes=1000)
    return guarded


def seen(answer):
    """All but what differs between any two requests."""
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in {"date", "x-request-id", "content-length"}
    }
    body = answer.text.replace(answer.headers["x-request-id"], "<id>")
    if body.startswith("{"):
        body = json.loads(body)
    return answer.status_code, headers, body


def blurred(shown, *, namespace, number):
    """An answer may repeat what was asked for."""
    text = repr(shown)
    for given, stands in (
        (fingerprint(number), "<fingerprint>"),
        (f"manifest-{number}", "<manifest>"),
        (f"run-{number}", "<run>"),
        (namespace, "<namespace>"),
    ):
        text = text.replace(given, stands)
    return text


@pytest.fixture(
    scope="module", params=["nobody", "unknown", "admin:elsewhere", "write:kep read:kept-*"]
)
def outsider(request, kept):
    """A caller without any right in the namespaces that are asked for."""
    tokens = {"nobody": None, "unknown": "gst_" + "a" * 16 + "_" + "B" * 43}
    if request.param in tokens:
        return kept.http(tokens[request.param])
    return kept.http(kept.token(*request.param.split()))


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_an_answer_does_not_tell_what_exists_from_what_does_not(outsider, method, path):
    answers = {}
    for namespace, number in (("kept", 1), ("kept", 2), ("void", 1)):
        answer = outsider.request(
            method,
            filled(path, namespace=namespace, number=number),
            json=body_of(path, number) if method in {"POST", "PUT"} else None,
        )
        answers[namespace, number] = blurred(seen(answer), namespace=namespace, number=number)

    assert len(set(answers.values())) == 1, answers
    assert answer.status_code in {401, 403, 404}
    assert "secret" not in str(answers)


def test_a_reader_can_tell_what_exists(kept):
    """Or the test above could not fail."""
    http = kept.http(kept.token("read:kept"))

    statuses = [http.get(artifact_path("kept", number)).status_code for number in (1, 2)]

    assert statuses == [200, 404]
