"""A JWT, forged or genuine, grants no more than the rules of its own issuer."""

import json
from dataclasses import asdict

import pytest

from support.guarded_server import GuardedServer, artifact_path, fingerprint, keys
from support.issuer import Cluster, Issuer

GITHUB = [
    {
        "claims": {"repository": "team/*", "ref": "refs/heads/main", "event_name": "push"},
        "grants": ["write:ci-*", "read:trusted"],
    },
    {"claims": {"repository": "team/infra"}, "grants": ["admin:**", "admin:ci-*"]},
    {"claims": {"repository": "one/subject"}, "grants": ["write:attack-*"]},
]
CLUSTER = [
    {
        "claims": {"kubernetes.io": {"namespace": "ci", "serviceaccount": {"name": "trainer"}}},
        "grants": ["write:cluster"],
    },
    {"claims": {"repository": "team/*"}, "grants": ["read:cluster"]},
]


@pytest.fixture(scope="module")
def github():
    with Issuer() as issuer:
        issuer.add_key("shared", "RS256")
        yield issuer


@pytest.fixture(scope="module")
def cluster():
    """An issuer whose key has the same id as a key of the other issuer."""
    with Cluster() as issuer:
        issuer.add_key("shared", "RS256")
        yield issuer


@pytest.fixture(scope="module")
def server(github, cluster, tmp_path_factory):
    issuers = [
        {"name": "github", "issuer": github.url, "audience": "graphstash", "rules": GITHUB},
        {"name": "k8s", "issuer": cluster.url, "audience": "graphstash-k8s", "rules": CLUSTER},
    ]
    options = {"oidc_issuers": json.dumps(issuers), "oidc_token_seconds": 3600}
    with GuardedServer(tmp_path_factory.mktemp("oidc"), **options) as server:
        server.set_policy("trusted", trusted=True)
        server.fill("trusted")
        yield server


@pytest.fixture
def shown(server, github, cluster):
    """Send JWTs to the server, as credentials and for an exchange. Return the statuses."""
    for good in (github.token("shared"), cluster.token("shared", aud="graphstash-k8s")):
        assert server.http(good).get("/v1/-/access").status_code == 200

    def shown(*jwts):
        with server.withstands():
            return {
                answer.status_code
                for jwt in jwts
                for answer in (
                    server.http(jwt).get("/v1/-/access"),
                    server.http(jwt).post("/v1/-/tokens:exchange", json={}),
                )
            }

    return shown


@pytest.fixture
def exchange(server):
    def exchange(credentials, *grants, **wanted):
        if grants:
            pairs = (each.split(":") for each in grants)
            wanted["grants"] = [{"scope": scope, "namespaces": name} for scope, name in pairs]
        return server.http(credentials).post("/v1/-/tokens:exchange", json=wanted)

    return exchange


def test_jwt_that_claims_another_issuer_is_refused(shown, github, cluster):
    """The forged JWTs combine the shared key id, the other issuer's key, its audience and claims
    that its rules accept. tests/service/test_oidc.py covers all other forms of a wrong JWT.
    """
    mixed = {"aud": ["graphstash", "graphstash-k8s"]}
    account = cluster._claims()["kubernetes.io"]
    assert shown(
        cluster.token("shared", iss=github.url, repository="team/x", **mixed),
        cluster.token("shared", iss=[github.url], **mixed),
        cluster.token("shared", iss=[github.url, cluster.url], **mixed),
        cluster.token("shared", iss=github.url + "/", **mixed),
        cluster.token("shared", iss=None, **mixed),
        github.token("shared", iss=cluster.url, **{"kubernetes.io": account}, **mixed),
        github.token("shared", key=cluster.keys["shared"][0], algorithm="RS256"),
        github.token("shared", without=["iss"]),
        github.token("shared", aud="graphstash-k8s"),
        cluster.token("shared"),
    ) == {401}


def test_jwt_that_names_its_own_key_is_refused(shown, github, cluster):
    key, url = cluster.keys["shared"][0], cluster.url + "/jwks"
    headers = {"jku": url}, {"jwk": cluster.jwk("shared")}, {"x5u": url}, {"kid": url}
    forged = [
        github.token("shared", key=key, algorithm="RS256", headers=each)
        for each in (*headers, {"kid": "../../realm/jwks"})
    ]
    assert shown(*forged) == {401}


_MORE = (
    *("admin:*", "admin:**", "write:*", "write:**", "write:c*", "write:ci*", "read:*", "read:**"),
    *("admin:ci-1", "admin:ci-*", "write:trusted", "write:trusted*", "write:tr*sted"),
    *("admin:trusted", "read:trusted*", "read:cluster", "write:*ci-*"),
)


def test_exchange_for_more_rights_than_the_jwt_has_is_refused(server, exchange, github):
    jwt = github.token("shared")

    with server.withstands() as refused:
        for grant in _MORE:
            alone, beside = exchange(jwt, grant), exchange(jwt, "read:trusted", grant)
            assert alone.status_code == beside.status_code == 403, grant
            assert grant in alone.json()["detail"]
    assert refused == {"forbidden": 2 * len(_MORE)}


def test_pattern_is_not_exchanged_for_the_name_of_a_trusted_namespace(server, exchange, github):
    """The pattern does not write to a trusted namespace, but a token that names it would."""
    server.set_policy("ci-release", trusted=True)
    jwt = github.token("shared")
    assert server.put(artifact_path("ci-release"), b"x", token=jwt).status_code == 403

    with server.withstands() as refused:
        answer = exchange(jwt, "write:ci-release")
    assert (answer.status_code, refused) == (403, {"forbidden": 1})
    assert "trusted" in answer.json()["detail"]
    token = exchange(jwt, "write:ci-rel*", "read:ci-release").json()["token"]
    assert server.put(artifact_path("ci-release"), b"x", token=token).status_code == 403


def test_pattern_of_stars_is_not_exchanged_for_server_administration(server, exchange, github):
    jwt = github.token("shared", repository="team/infra", ref="refs/heads/mine")

    with server.withstands() as refused:
        answers = [exchange(jwt, f"{scope}:*").status_code for scope in ("admin", "write", "read")]
    assert (answers, refused) == ([403] * 3, {"forbidden": 3})
    token = exchange(jwt, "admin:**").json()["token"]
    assert server.http(token).get("/v1/-/tokens").status_code == 403


def test_exchanged_token_cannot_be_exchanged_again(server, exchange, github):
    token = exchange(github.token("shared"), lifetime_seconds=60).json()["token"]
    own = server.token("admin:ci-*")

    with server.withstands() as refused:
        answers = [
            exchange(token),
            exchange(token, lifetime_seconds=3600),
            exchange(own, "write:ci-*"),
            exchange(server.admin),
            exchange(None),
            exchange(".."),
        ]
    assert [answer.status_code for answer in answers] == [403] * 4 + [401] * 2
    assert refused == {"forbidden": 4, "unauthenticated": 2}


def test_subjects_that_differ_only_after_shortening_get_distinct_names(exchange, cluster):
    """Leases, reports, limits and manifests identify callers by name."""

    def name_of(sub):
        info = exchange(cluster.token("shared", aud="graphstash-k8s", sub=sub)).json()["info"]
        return info["description"]

    long = "a" * 200
    names = [name_of(sub) for sub in (long, long + "b", "a\x01", "a\x02", "a\ud800", "a?")]
    names.append(name_of(names[0].removeprefix("oidc/k8s:")))
    assert len({*names}) == 7
    assert all(name.isprintable() and len(name) <= 128 for name in names)
    assert names[5] == "oidc/k8s:a?"


@pytest.fixture
def callers(server, exchange, github):
    """Return callers of one subject: two of its JWTs, and three tokens in exchange for them."""

    def of(subject="repo:one/model"):
        claims = {"repository": "one/subject", "sub": subject}
        jwts = [github.token("shared", jti=name, **claims) for name in "ab"]
        issued = [exchange(jwt).json()["token"] for jwt in (jwts[0], *jwts)]
        return [server.http(each) for each in (*jwts, *issued)]

    return of


def test_reports_of_one_subject_with_several_tokens_withhold_nothing(
    server, callers, space, key, publish
):
    """All tokens of a subject are one caller, which also holds their leases."""
    publish(key(), b"an executable", server=server)
    wrong = {"key": asdict(key()), "digest": server.digest_of(space), "reason": "corrupt"}

    def report(caller):
        answer = caller.post(f"/v1/{space}/artifacts:report", json=wrong)
        assert answer.status_code == 200, answer.text
        return answer.json()["withheld"]

    mine = callers()
    assert not any(report(caller) for caller in mine)
    assert mine[0].get(artifact_path(space)).status_code == 200
    assert report(callers("repo:one/other")[-1])

    for number, caller in enumerate(mine, start=1):
        assert caller.post(key(number).lease_path(space), json={}).status_code == 201
    holders = {row.caller for row in server.picture().rows["leases"] if row.namespace == space}
    assert holders == {"oidc/github:repo:one/model"}


def test_tokens_of_one_subject_evict_no_manifest_entries_of_other_writers(server, callers, space):
    """A subject's tokens are one writer, so they cannot evict entries that two writers share."""
    path = f"/v1/{space}/manifests/train"

    def put(caller, numbers):
        assert caller.put(path, json={"keys": keys(numbers)}).status_code in {200, 201}

    honest = [server.http(server.token(f"write:{space}")) for _ in range(2)]
    for caller in honest:
        put(caller, range(300))
    for caller in callers()[1:4]:  # two JWTs, and a token
        put(caller, range(10_000, 14_000))

    entries = honest[0].get(path).json()["entries"]
    assert {entry["key"]["fingerprint"] for entry in entries} >= set(map(fingerprint, range(300)))
