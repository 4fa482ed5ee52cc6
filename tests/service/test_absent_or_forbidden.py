"""A caller without rights gets the same answer for present and absent resources."""

import json

import pytest

from graphstash_server.app import create_app
from graphstash_server.settings import Settings
from support.api import Api

# The server decides on rights before it queries the database for anything else.
pytestmark = pytest.mark.parametrize("start_once", ["sqlite"], indirect=True)

PATHS = create_app(Settings()).openapi()["paths"]
CALLS = [(method.upper(), path) for path in PATHS if "{" in path for method in PATHS[path]]


def words_of(api, number):
    """Return the words in the path of a call about artifact, manifest and run `number`."""
    return api.key(number) | {
        "namespace": api.namespace,
        "name": f"manifest-{number}",
        "id": "a" * 16,
        "run": f"run-{number}",
        "process": "p0",
    }


def body_of(path, key):
    """Return a valid body of the call."""
    if path.endswith((":lookup", "/{name}")):
        return {"keys": [key]}
    if path.endswith(":verify"):
        return key
    if path.endswith(":report"):
        return {"key": key, "digest": f"sha256:{'0' * 64}", "reason": "corrupt"}
    return {}


@pytest.fixture(scope="module")
def kept(guarded):
    """A namespace with an artifact, a manifest and a run called 1, and none called 2."""
    admin = guarded.api("kept")
    assert admin.put(b"secret", 1).is_success
    manifest = admin.http.put("/v1/kept/manifests/manifest-1", json={"keys": [admin.key(1)]})
    assert manifest.is_success
    report = {"started_at": "2026-01-01T00:00:00Z", "seconds": 1}
    assert admin.http.put("/v1/kept/runs/run-1/p0", json=report).is_success
    guarded.set_policy("kept", mode="read_only", limit_bytes=1000)
    yield guarded
    guarded.set_policy("kept", mode="write_once")  # later tests use this server


def seen(answer, words):
    """Return the answer without the parts that differ per request or repeat its words."""
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in {"date", "x-request-id", "content-length"}
    }
    body = answer.text.replace(answer.headers["x-request-id"], "<id>")
    body = json.loads(body) if body.startswith("{") else body
    text = repr((answer.status_code, headers, body))
    for name in ("fingerprint", "name", "run", "namespace"):
        text = text.replace(words[name], f"<{name}>")
    return text


@pytest.mark.parametrize("shown", ["nobody", "unknown", "admin:elsewhere", "write:kep"])
def test_answer_without_read_right_is_same_for_present_and_absent(kept, shown):
    tokens = {"nobody": None, "unknown": "gst_" + "a" * 16 + "_" + "B" * 43}
    http = kept.http(tokens[shown] if shown in tokens else kept.token(shown, "read:kept-*"))
    reader = kept.api("kept", "read:kept")
    for method, path in CALLS:
        answers = set()
        for namespace, number in (("kept", 1), ("kept", 2), ("void", 1)):
            api = Api(kept.url, namespace)
            words = words_of(api, number)
            body = body_of(path, api.key(number)) if method in {"POST", "PUT"} else None
            answer = http.request(method, path.format_map(words), json=body)
            assert answer.status_code in {401, 403, 404}, (method, path)
            assert "secret" not in answer.text
            answers.add(seen(answer, words))
        is_read = method in {"GET", "HEAD"} and path.endswith(
            ("/{fingerprint}", "manifests/{name}")
        )
        if is_read and shown not in tokens:  # equal to a reader's answer for an absent resource
            words = words_of(reader, 2)
            answers.add(seen(reader.http.request(method, path.format_map(words)), words))
        assert len(answers) == 1, (method, path, answers)
    # The calls changed nothing, and a reader still distinguishes present from absent.
    assert [reader.get(number).status_code for number in (1, 2)] == [200, 404]
