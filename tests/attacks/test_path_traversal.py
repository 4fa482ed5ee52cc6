"""A name that is a path makes neither server nor client read, write or look up another file."""

import dataclasses
import json

import pytest

from graphstash import CacheError
from graphstash_schema import ManifestName
from support.guarded_server import DEVICE, artifact_path
from support.wire import Wire, head

_NAMES = (
    *("..", ".", "%2e%2e", "%2E%2e", "..%2f..%2fcanary", "%2e%2e%2f%2e%2e%2fcanary"),
    *("..%5c..%5ccanary", "..\\..\\canary", "%252e%252e%252fcanary", "a%00", "%00"),
    *("a%00/../../canary", "%c0%ae%c0%ae", "%e0%80%ae%e0%80%ae", "%c0%af", "\xc0\xae"),
    *("%uff0e%uff0e", "..;", "~root", "C:%5cWindows", "con%3a", "a%0d%0aX-Injected:%20yes"),
    *("%ff%fe", "canary%23", "-"),
)
_DOWN = "/".join([".."] * 12)
_ARTIFACT = ("GET", "PUT", "DELETE")


def _paths(name, namespace):
    """Return each path that contains the name, and the methods that parse it."""
    kind, device, fingerprint = artifact_path(namespace).split("/")[-3:]
    return (
        (f"/v1/{name}/artifacts/{kind}/{device}/{fingerprint}", _ARTIFACT),
        (f"/v1/{namespace}/artifacts/{name}/{device}/{fingerprint}", _ARTIFACT),
        (f"/v1/{namespace}/artifacts/{kind}/{name}/{fingerprint}", _ARTIFACT),
        (f"/v1/{namespace}/artifacts/{kind}/{device}/{name}", _ARTIFACT),
        (f"/v1/{namespace}/leases/{kind}/{device}/{name}", ("POST", "PUT", "DELETE")),
        (f"/v1/{namespace}/manifests/{name}", ("GET", "PUT")),
        (f"/v1/-/tokens/{name}", ("DELETE",)),
        (f"/v1/-/namespaces/{name}", ("GET", "PUT", "DELETE")),
        (f"/v1/-/quarantine?namespace={name}", ("GET",)),
        (f"/v1/-/audit?namespace={name}", ("GET",)),
    )


def test_name_in_a_path_does_not_lead_out_of_the_store(fort, space):
    """The caller is the administrator, whom no other check stops. Each name is tried in each
    position, with one of the methods that parse it.
    """
    fort.fill(space)
    asked = 0

    with fort.withstands() as refused:
        for number, name in enumerate(_NAMES):
            for place, (path, methods) in enumerate(_paths(name, space)):
                method = methods[(number + place) % len(methods)]
                with Wire(fort.url) as wire:
                    request_head = head(method, path, "Content-Length: 2", token=fort.admin)
                    answer = wire.ask(request_head + b"{}")
                assert 400 <= answer.status < 500, (path, answer)
                assert fort.canary.encode() not in answer.body
                assert "x-injected" not in answer.headers
                asked += 1
    assert refused.total() == asked
    assert fort.http(fort.admin).get(artifact_path(space)).status_code == 200


_TARGETS = (
    *(
        f"/{_DOWN}/etc/passwd",
        f"/v1/{_DOWN}/canary",
        f"/v1/x/artifacts/jax/{DEVICE}/{_DOWN}/canary",
    ),
    *("/_blobs/../../canary", "/blobs/sha256/../../../canary"),
    *("/v1/team%2f..%2f..%2fcanary/manifests/m", "http://127.0.0.1/v1/-/tokens"),
    *("file:///etc/passwd", "//127.0.0.1/v1/-/tokens", "/v1//-/tokens", "/v1/-//tokens"),
    *("/v1/-/./tokens", "/v1/x/../-/tokens", "/v1/-/tokens/", "/V1/-/tokens"),
)


def test_other_spellings_of_a_target_are_refused(fort, space):
    """The server refuses each target to the administrator. Therefore no other spelling reaches a
    guarded call, or a file that the server names to nginx.
    """
    fort.fill(space)
    sha256 = fort.digest_of(space).removeprefix("sha256:")
    blobs = (f"/{folder}/sha256/{sha256[:2]}/{sha256}" for folder in ("_blobs", "blobs"))
    targets = (*_TARGETS, *blobs)
    with fort.withstands() as refused:
        for target in targets:
            with Wire(fort.url) as wire:
                answer = wire.ask(head("GET", target, token=fort.admin))
            assert 400 <= answer.status < 500, target
            assert fort.canary.encode() not in answer.body
    assert refused.total() == len(targets)


def test_key_in_a_body_that_is_a_path_is_refused(fort, space):
    admin = fort.http(fort.admin)
    good = {"kind": "jax", "device_type": DEVICE, "fingerprint": "0" * 64}
    bad = [
        good | {field: value}
        for field in good
        for value in ("..", "../../canary", "a/../../b", "a\0", "\\..\\canary", "\u2025/canary", "")
    ]

    with fort.withstands() as refused:
        for key in bad:
            report = {"key": key, "digest": f"sha256:{'0' * 64}", "reason": "corrupt"}
            for call, body in (
                ("artifacts:lookup", {"keys": [key]}),
                ("artifacts:verify", key),
                ("artifacts:report", report),
                ("artifacts:release", key),
            ):
                assert admin.post(f"/v1/{space}/{call}", json=body).status_code == 400
            assert admin.put(f"/v1/{space}/manifests/m", json={"keys": [key]}).status_code == 400
    assert refused.total() == 5 * len(bad)
    assert set(refused) == {"invalid_kind", "invalid_device_type", "invalid_fingerprint"}


def test_paths_in_the_manifest_of_a_hostile_server_are_refused(middlebox, victim, tmp_path, key):
    """Otherwise the client would look for the paths on its own disk."""
    sound = dataclasses.asdict(key())
    (tmp_path / "canary").write_text("mine")
    for field in sound:
        wrong = sound | {field: "../../../canary"}
        entry = {"key": wrong, "used_at": "2026-01-01T00:00:00Z", "runs": 1}
        body = json.dumps({"name": "m", "entries": [entry]}).encode()

        def change(request, answer, body=body):
            headers = answer.headers | {"content-type": "application/json"}
            return dataclasses.replace(answer, status=200, headers=headers, body=body)

        job = victim(url=middlebox(change).url)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CacheError) as caught:
            job.stash.server.manifest(ManifestName("m"))
        assert caught.value.reason == "protocol"
        assert sorted(tmp_path.rglob("*")) == before
