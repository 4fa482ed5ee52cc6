"""JWTs of two issuers, exchanged for tokens that live as long as a job."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from graphstash_schema import TOKEN_FORM, AccessKind, Digest, Grant, TokenExchange
from graphstash_server.commands.token import token
from graphstash_server.services.identity import tokens as tokens_module
from graphstash_server.services.identity.principals import Principal
from support.commands import invoke
from support.guarded_server import artifact_path
from support.issuer import Cluster, Issuer
from support.services import ACTOR, FakeClock, new_token
from support.tokens import Guarded

GITHUB = [
    {
        "claims": {"repository": "team/*", "ref": "refs/heads/main", "event_name": "push"},
        "grants": ["write:ci", "write:scratch-*", "read:trusted"],
    }
]
CLUSTER = [
    {
        "claims": {"kubernetes.io": {"namespace": "ci", "serviceaccount": {"name": "trainer"}}},
        "grants": ["read:ci"],
    }
]


@pytest.fixture(scope="module")
def github():
    with Issuer() as issuer:
        issuer.add_key("first")
        yield issuer


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as issuer:
        issuer.add_key("first", "RS256")
        yield issuer


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def settings(request, github, cluster, tmp_path_factory):
    """Settings with one issuer in the variables for one, and another one in the list."""
    url = f"sqlite:///{tmp_path_factory.mktemp('database') / 'graphstash.sqlite3'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    return {
        "database_url": url,
        "oidc_issuer": github.url,
        "oidc_audience": "graphstash",
        "oidc_rules": GITHUB,
        "oidc_issuers": [
            {"name": "k8s", "issuer": cluster.url, "audience": "graphstash", "rules": CLUSTER}
        ],
        "oidc_token_seconds": 3 * 3600,
    }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, settings):
    with Guarded(tmp_path_factory.mktemp("server"), **settings) as guarded:
        yield guarded


@pytest.fixture
def clock(guarded, monkeypatch):
    """The clock that the server reads to judge tokens and JWTs."""
    clock = FakeClock()
    clock.now = datetime.now(UTC)
    context = guarded.server._server.config.app.state.context
    for service in (context.access, context.access.tokens, context.tokens):
        monkeypatch.setattr(service, "clock", clock)
    return clock


@pytest.fixture
def subject(namespace):
    """A subject that no other test uses."""
    return f"repo:team/{namespace}"


@pytest.fixture
def exchange(guarded):
    def exchange(jwt, **wanted):
        return guarded.http(jwt).post("/v1/-/tokens:exchange", json=wanted)

    return exchange


def put(caller, namespace, number=0):
    headers = {"Repr-Digest": Digest.of(b"x").repr_digest}
    return caller.put(artifact_path(namespace, number), content=b"x", headers=headers).status_code


def test_jobs_of_two_providers_keep_their_rights_for_two_hours(
    guarded, exchange, clock, github, cluster
):
    jwts = [github.token("first"), cluster.token("first")]
    writer_jwt, reader_jwt = map(guarded.http, jwts)
    issued = [exchange(jwt, lifetime_seconds=2 * 3600 + 60).json() for jwt in jwts]
    writer, reader = (guarded.http(each["token"]) for each in issued)
    assert put(writer, "ci") == put(writer_jwt, "ci", 1) == 201
    assert reader.get(artifact_path("ci")).status_code == 200

    clock.turn(6 * 60)
    assert put(writer_jwt, "ci", 2) == 401
    assert reader_jwt.get(artifact_path("ci")).status_code == 401
    assert put(writer, "ci", 2) == 201

    clock.turn(2 * 3600 - 6 * 60)
    assert put(writer, "ci", 3) == 201
    assert reader.get(artifact_path("ci", 3)).status_code == 200
    assert put(reader, "ci", 4) == 403

    clock.turn(61)
    assert put(writer, "ci", 4) == 401
    assert reader.get(artifact_path("ci")).status_code == 401


def test_exchanged_token_has_at_most_its_jwts_rights_until_the_servers_limit(
    exchange, guarded, github, clock
):
    answer = exchange(github.token("first"))
    token, info = answer.json()["token"], answer.json()["info"]

    assert answer.status_code == 201
    assert answer.headers["Cache-Control"] == "no-store"
    assert TOKEN_FORM.fullmatch(token)["id"] == info["id"]
    access = guarded.http(token).get("/v1/-/access").json()
    assert access["kind"] == "token"
    assert access["name"] == f"token:{info['id']} oidc:repo:team/model"
    assert access["grants"] == info["grants"]
    assert [str(Grant.model_validate(each)) for each in info["grants"]] == GITHUB[0]["grants"]
    assert datetime.fromisoformat(info["expires_at"]) == clock.now + timedelta(hours=3)

    for grant in (
        *("write:ci", "read:ci", "read:scratch-1"),
        *("write:scratch-1*", "write:scratch-*", "read:trusted"),
    ):
        wanted = [Grant.parse(grant).model_dump(mode="json")]
        issued = exchange(github.token("first"), grants=wanted).json()
        assert guarded.http(issued["token"]).get("/v1/-/access").json()["grants"] == wanted


def test_malformed_exchange_is_refused(exchange, github, problem):
    for changed, code, names in (
        ({"lifetime_seconds": 3 * 3600 + 1}, "invalid_request", "10800"),
        ({"lifetime_seconds": 10**30}, "invalid_request", "lifetime_seconds"),
        ({"grants": [{"scope": "read", "namespaces": "A"}]}, "invalid_pattern", "A"),
        ({"grants": [{"scope": "read", "namespaces": "ci"}] * 65}, "invalid_request", "grants"),
    ):
        problem(exchange(github.token("first"), **changed), 400, code, names)


def test_exchanged_token_is_listed_and_logged_with_subject(exchange, guarded, cluster, monkeypatch):
    info = exchange(cluster.token("first")).json()["info"]
    admin = guarded.http(guarded.admin)

    assert info["issuer"] == cluster.url
    assert info in admin.get("/v1/-/tokens").json()["tokens"]
    entry = admin.get("/v1/-/audit").json()["entries"][0]
    assert (entry["action"], entry["subject"]) == ("token_create", info["id"])
    assert entry["actor"] == "oidc/k8s:system:serviceaccount:ci:trainer"
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(guarded.server.data_dir))
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", guarded.database_url)
    assert "oidc/k8s:system:serviceaccount:ci:trainer" in invoke(token, "list")


def test_tokens_of_an_issuer_end_when_the_server_stops_trusting_it(
    exchange, guarded, github, cluster, settings
):
    issued = [exchange(each.token("first")).json()["token"] for each in (github, cluster)]
    left = settings | {"oidc_issuers": []}
    with Guarded(guarded.server.data_dir, **left) as later:
        answers = [later.http(token).get("/v1/-/access").status_code for token in issued]
        own = later.http(later.token("read:*")).get("/v1/-/access").status_code

    assert [*answers, own] == [200, 401, 200]


@pytest.mark.sql
def test_number_of_tokens_per_subject_is_limited(
    exchange, guarded, github, problem, clock, monkeypatch, subject
):
    monkeypatch.setattr(tokens_module, "MAX_EXCHANGED_PER_SUBJECT", 2)
    jwt = github.token("first", sub=subject)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: exchange(jwt, lifetime_seconds=60), range(8)))
    made = [answer.json() for answer in answers if answer.status_code == 201]
    assert len(made) == 2

    problem(exchange(jwt), 409, "conflict", f"oidc:{subject} has 2 tokens")
    assert exchange(github.token("first", sub=f"{subject}-other")).status_code == 201
    guarded.http(guarded.admin).delete(f"/v1/-/tokens/{made[0]['info']['id']}")
    clock.turn(120)
    problem(exchange(jwt), 409, "conflict", "not yet an hour old")
    clock.turn(3600)
    late = github.token("first", sub=subject, exp=int(time.time()) + 7200)
    assert exchange(late).status_code == 201


def test_all_subjects_together_leave_room_for_administrators(
    exchange, guarded, github, cluster, problem, monkeypatch, subject
):
    listed = guarded.http(guarded.admin).get("/v1/-/tokens").json()["tokens"]
    before = sum(token["issuer"] is not None for token in listed)
    monkeypatch.setattr(tokens_module, "MAX_EXCHANGED_TOKENS", before + 2)
    assert exchange(github.token("first", sub=subject)).status_code == 201
    assert exchange(cluster.token("first", sub=subject)).status_code == 201

    problem(exchange(github.token("first", sub=f"{subject}-2")), 409, "conflict", "all callers")
    assert guarded.token("read:*")


@pytest.mark.sql
@pytest.mark.anyio
async def test_tokens_of_jobs_are_deleted_an_hour_after_their_expiry(opened):
    job = Principal(
        kind=AccessKind.OIDC,
        name="oidc:job",
        grants=(Grant.parse("read:ci"),),
        issuer="https://ci",
    )
    async with opened() as server:
        tokens = server.context.tokens
        own = await new_token(tokens, expires_at=opened.clock.now + timedelta(seconds=60))
        await tokens.exchange(
            TokenExchange(lifetime_seconds=60), caller=job, max_lifetime_seconds=60, actor=ACTOR
        )
        ago, kept_for = server.context.plausible_clock.ago, timedelta(days=90)
        opened.clock.turn(3600)
        assert await tokens.forget_ended(ago=ago, kept_for=kept_for) == 0
        opened.clock.turn(61)
        assert await tokens.forget_ended(ago=ago, kept_for=kept_for) == 1
        assert [each.id for each in (await tokens.list_all()).tokens] == [own.info.id]


def test_server_without_authentication_exchanges_no_jwt(tmp_path, problem):
    with Guarded(tmp_path, auth="none") as everybody:
        answer = everybody.http().post("/v1/-/tokens:exchange", json={})

    problem(answer, 403, "forbidden", "no JWT")
