"""One job of an identity provider that plays many callers: it gets a token for every exchange."""

import json

import pytest

from support.guarded_server import DEVICE, GuardedServer, artifact_path, fingerprint
from support.issuer import Issuer

RULES = [{"claims": {"repository": "team/*"}, "grants": ["write:attack-*"]}]


@pytest.fixture(scope="module")
def issuer():
    with Issuer() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture(scope="module")
def server(issuer, tmp_path_factory):
    options = {"oidc_issuer": issuer.url, "oidc_audience": "graphstash"}
    directory = tmp_path_factory.mktemp("one-subject")
    with GuardedServer(directory, **options, oidc_rules=json.dumps(RULES)) as server:
        yield server


@pytest.fixture
def callers(server, issuer):
    """The JWT of a subject, another one of the same, and tokens in exchange for them."""

    def of(subject="repo:team/model"):
        jwts = [issuer.token("first", sub=subject, jti=name) for name in "ab"]
        issued = [
            server.http(jwt).post("/v1/-/tokens:exchange", json={}).json()["token"]
            for jwt in (jwts[0], *jwts)
        ]
        return [server.http(each) for each in (*jwts, *issued)]

    return of


def test_a_subject_reports_a_sound_artifact_with_a_second_token(
    server, callers, space, key, publish
):
    """Its tokens are one caller, who also holds their leases."""
    publish(key(), b"an executable", server=server)
    wrong = {
        "key": key().model_dump(mode="json"),
        "digest": server.digest_of(space),
        "reason": "corrupt",
    }

    def report(caller):
        answer = caller.post(f"/v1/{space}/artifacts:report", json=wrong)
        assert answer.status_code == 200, answer.text
        return answer.json()["withheld"]

    mine = callers()
    assert not any(report(caller) for caller in mine)
    assert mine[0].get(artifact_path(space)).status_code == 200
    assert report(callers("repo:team/other")[-1])

    for number, caller in enumerate(mine, start=1):
        assert caller.post(key(number).lease_path(space), json={}).status_code == 201
    holders = {row.caller for row in server.picture().rows["leases"] if row.namespace == space}
    assert holders == {"oidc:repo:team/model"}


def test_a_subject_pushes_what_others_share_out_of_a_manifest(server, callers, space):
    """What two writers name belongs to nobody: its tokens are not two writers."""
    path = f"/v1/{space}/manifests/train"

    def put(caller, numbers):
        keys = [
            {"kind": "jax", "device_type": DEVICE, "fingerprint": fingerprint(number)}
            for number in numbers
        ]
        assert caller.put(path, json={"keys": keys}).status_code in {200, 201}

    honest = [server.http(server.token(f"write:{space}")) for _ in range(2)]
    for writer in honest:
        put(writer, range(300))

    attackers = callers()
    for attacker in attackers:
        put(attacker, range(10_000, 14_000))

    entries = honest[0].get(path).json()["entries"]
    assert {entry["key"]["fingerprint"] for entry in entries} >= set(map(fingerprint, range(300)))
