"""Jobs of an identity provider, or who says so, that want more than their JWT gives."""

import base64
import hashlib
import hmac
import json
import time

import pytest
from cryptography.hazmat.primitives import serialization

from support.guarded_server import GuardedServer, artifact_path
from support.issuer import Cluster, Issuer

GITHUB = [
    {
        "claims": {"repository": "team/*", "ref": "refs/heads/main", "event_name": "push"},
        "grants": ["write:ci-*", "read:trusted"],
    },
    {"claims": {"repository": "team/infra"}, "grants": ["admin:**", "admin:ci-*"]},
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
    """Its key has the id of the other provider's."""
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
    """Shows JWTs to the server, as a job does and for an exchange; the statuses."""
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


def encoded(value):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_a_jwt_of_one_provider_says_that_it_is_of_another(shown, github, cluster):
    """With the same key id, each other's key, and what the other's rules ask for."""
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
    ) == {401}


def test_a_jwt_brings_a_key_of_its_own_along(shown, github, cluster):
    key = cluster.keys["shared"][0]
    for header in (
        {"jku": cluster.url + "/jwks"},
        {"jwk": cluster.jwk("shared")},
        {"x5u": cluster.url + "/jwks"},
        {"kid": cluster.url + "/jwks"},
        {"kid": "../../realm/jwks"},
    ):
        forged = github.token("shared", key=key, algorithm="RS256", headers=header)
        assert shown(forged) == {401}


def test_a_jwt_is_signed_with_a_public_key_or_not_at_all(shown, github):
    public = github.keys["shared"][0].public_key()
    body = github.token("shared").split(".")[1]
    secrets = [
        public.public_bytes(serialization.Encoding.PEM, form)
        for form in (
            serialization.PublicFormat.SubjectPublicKeyInfo,
            serialization.PublicFormat.PKCS1,
        )
    ]
    forged = []
    for algorithm in ("HS256", "none", "None", "RS256"):
        signed = f"{encoded({'alg': algorithm, 'typ': 'JWT', 'kid': 'shared'})}.{body}"
        for secret in (*secrets, b""):
            signature = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
            forged += [f"{signed}.{encoded(signature)}", f"{signed}."]
    assert shown(*forged) == {401}


def test_a_jwt_for_another_service_is_used_here(shown, github, cluster):
    """Also the audience that this server has for its other provider."""
    assert shown(
        github.token("shared", aud="sts.amazonaws.com"),
        github.token("shared", aud="graphstash-k8s"),
        github.token("shared", aud=[]),
        github.token("shared", aud="graphstash "),
        github.token("shared", aud="Graphstash"),
        github.token("shared", aud={"graphstash": 1}),
        github.token("shared", without=["aud"]),
        cluster.token("shared"),
        cluster.token("shared", aud=["graphstash"]),
    ) == {401}


def test_a_jwt_without_rights_is_exchanged(shown, github, cluster):
    assert shown(
        github.token("shared", repository="stranger/x"),
        github.token("shared", repository="team/x/../../stranger/y"),
        github.token("shared", repository="team/x", ref="refs/heads/mine"),
        github.token("shared", repository="team/x", event_name="pull_request_target"),
        cluster.token("shared", aud="graphstash-k8s", **{"kubernetes.io": {"namespace": "ci"}}),
        cluster.token(
            "shared",
            aud="graphstash-k8s",
            **{"kubernetes.io.namespace": "ci"} | {"kubernetes.io": None},
        ),
    ) == {401}


def test_an_old_jwt_or_one_of_the_future_is_exchanged(shown, github):
    """Half a minute is what clocks may differ by."""
    now = int(time.time())
    assert shown(
        github.token("shared", iat=now - 400, nbf=now - 400, exp=now - 60),
        github.token("shared", nbf=now + 600),
        github.token("shared", iat=now + 600, nbf=now),
        github.token("shared", exp=now - 10**6),
        github.token("shared", without=["exp"]),
    ) == {401}


_MORE = (
    *("admin:*", "admin:**", "write:*", "write:**", "write:c*", "write:ci*", "read:*", "read:**"),
    *("admin:ci-1", "admin:ci-*", "write:trusted", "write:trusted*", "write:tr*sted"),
    *("admin:trusted", "read:trusted*", "read:cluster", "write:*ci-*"),
)


@pytest.mark.parametrize("grant", _MORE)
def test_a_token_with_more_rights_than_the_jwt_is_asked_for(server, exchange, github, grant):
    jwt = github.token("shared")

    with server.withstands() as refused:
        alone, beside = exchange(jwt, grant), exchange(jwt, "read:trusted", grant)
    assert alone.status_code == beside.status_code == 403
    assert grant in alone.json()["detail"]
    assert refused == {"forbidden": 2}


def test_a_pattern_becomes_a_name_that_a_trusted_namespace_takes(server, exchange, github):
    """The pattern does not write there; a name does."""
    server.set_policy("ci-release", trusted=True)
    jwt = github.token("shared")
    assert server.put(artifact_path("ci-release"), b"x", token=jwt).status_code == 403

    with server.withstands() as refused:
        answer = exchange(jwt, "write:ci-release")
    assert (answer.status_code, refused) == (403, {"forbidden": 1})
    assert "trusted" in answer.json()["detail"]
    token = exchange(jwt, "write:ci-rel*", "read:ci-release").json()["token"]
    assert server.put(artifact_path("ci-release"), b"x", token=token).status_code == 403


def test_a_pattern_of_stars_becomes_the_administration_of_the_server(server, exchange, github):
    jwt = github.token("shared", repository="team/infra", ref="refs/heads/mine")

    with server.withstands() as refused:
        answers = [exchange(jwt, f"{scope}:*").status_code for scope in ("admin", "write", "read")]
    assert (answers, refused) == ([403] * 3, {"forbidden": 3})
    token = exchange(jwt, "admin:**").json()["token"]
    assert server.http(token).get("/v1/-/tokens").status_code == 403


def test_an_exchanged_token_is_exchanged_for_a_longer_life(server, exchange, github):
    token = exchange(github.token("shared"), lifetime_seconds=60).json()["token"]
    own = server.token("admin:ci-*")

    with server.withstands() as refused:
        answers = [
            exchange(token),
            exchange(token, lifetime_seconds=3600),
            exchange(own, "write:ci-*"),
            exchange(server.admin),
        ]
    assert [answer.status_code for answer in answers] == [403] * 4
    assert refused == {"forbidden": 4}


def test_nobody_exchanges_nothing(server):
    with server.withstands() as refused:
        answers = [
            server.http().post("/v1/-/tokens:exchange", json={}),
            server.http("..").post("/v1/-/tokens:exchange", json={}),
            server.http().post("/v1/-/tokens%3Aexchange", json={}),
        ]
    assert [answer.status_code for answer in answers][:2] == [401] * 2
    assert answers[2].status_code in {400, 401, 404}
    assert refused["unauthenticated"] >= 2


def test_a_replayed_jwt_gives_tokens_that_all_end_and_can_all_be_revoked(server, exchange, github):
    """Whoever has stolen it can do what its job could, within its five minutes, and no longer than
    the server's limit; the tokens are listed with the subject.
    """
    jwt = github.token("shared", sub="repo:team/stolen")
    issued = [exchange(jwt).json() for _ in range(3)]
    admin = server.http(server.admin)
    listed = [
        each
        for each in admin.get("/v1/-/tokens").json()["tokens"]
        if each["description"] == "oidc/github:repo:team/stolen"
    ]

    assert {each["id"] for each in listed} == {each["info"]["id"] for each in issued}
    assert all(each["expires_at"] for each in listed)
    for each in listed:
        assert admin.delete(f"/v1/-/tokens/{each['id']}").status_code == 204
    with server.withstands() as refused:
        for each in issued:
            assert server.http(each["token"]).get("/v1/-/access").status_code == 401
    assert refused == {"unauthenticated": 3}


@pytest.mark.extended  # tests/service/test_exchange.py proves the limit with a smaller one
def test_a_jwt_is_exchanged_by_the_thousand(server, exchange, github):
    jwt = github.token("shared", sub="repo:team/many")
    answers = [exchange(jwt, lifetime_seconds=60).status_code for _ in range(1_000)]
    assert set(answers) == {201}

    with server.withstands() as refused:
        assert {exchange(jwt, lifetime_seconds=60).status_code for _ in range(10)} == {409}
    assert refused == {"conflict": 10}
    assert exchange(github.token("shared", sub="repo:team/other")).status_code == 201
    assert server.token("read:*")


def test_a_provider_names_its_subject_like_another_ones(server, exchange, github, cluster):
    sub = "github:repo:team/model"
    jwt = cluster.token("shared", aud="graphstash-k8s", sub=sub)
    info = exchange(jwt).json()["info"]
    cleared = cluster.token(
        "shared", aud="graphstash-k8s", sub="a\x1b[2J\noidc/github:b" + "c" * 300
    )

    assert (info["description"], info["issuer"]) == (f"oidc/k8s:{sub}", cluster.url)
    assert (
        exchange(cleared).json()["info"]["description"].startswith("oidc/k8s:a?[2J?oidc/github:b")
    )
