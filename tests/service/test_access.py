"""Who may do what, where, and how it is found out."""

import asyncio
import contextlib
import json
import socket
from datetime import timedelta

import pytest
from fastapi.routing import APIRoute

from graphstash_schema import AccessKind, Digest, Grant, NamespacePattern, TokenRequest
from graphstash_server.app import create_app
from graphstash_server.counters import Counters
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.tokens import find_tokens
from graphstash_server.errors import ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.identity.authentication import (
    MAX_DECISION_AGE,
    AccessService,
    KnownTokens,
)
from graphstash_server.services.identity.tokens import TokenService
from graphstash_server.settings import load_settings
from support.services import ACTOR, FakeClock
from support.statements import recorded
from support.tokens import Guarded
from support.waiting import until
from support.wire import Wire

BLOB = b"x" * 1000
DIGEST = {"Repr-Digest": Digest.of(BLOB).repr_digest}
KEY = {"kind": "jax", "device_type": "cpu", "fingerprint": "a" * 64}
OTHER = KEY | {"fingerprint": "b" * 64}
OPEN = {"/healthz", "/readyz", "/openapi.json"}
PAGES = {"/", "/search", "/docs", "/sign-in", "/sign-out", "/assets/{name}"}
"""They show everybody what everybody may read: see test_pages and test_sign_in."""
UNKNOWN = f"Bearer gst_{'a' * 16}_{'A' * 43}"

pytestmark = pytest.mark.anyio


def artifact(namespace, key=KEY):
    return f"/v1/{namespace}/artifacts/jax/cpu/{key['fingerprint']}"


def lease(namespace):
    return f"/v1/{namespace}/leases/jax/cpu/{'a' * 64}"


CALLS = {
    "get": lambda n: ("GET", artifact(n), {}),
    "head": lambda n: ("HEAD", artifact(n), {}),
    "lookup": lambda n: ("POST", f"/v1/{n}/artifacts:lookup", {"json": {"keys": [KEY]}}),
    "verify": lambda n: ("POST", f"/v1/{n}/artifacts:verify", {"json": KEY}),
    "report": lambda n: (
        "POST",
        f"/v1/{n}/artifacts:report",
        {"json": {"key": KEY, "digest": str(Digest.of(BLOB)), "reason": "corrupt"}},
    ),
    "get manifest": lambda n: ("GET", f"/v1/{n}/manifests/m", {}),
    "put": lambda n: ("PUT", artifact(n), {"content": BLOB, "headers": DIGEST}),
    "acquire": lambda n: ("POST", lease(n), {"json": {"ttl_seconds": 1}}),
    "renew": lambda n: ("PUT", lease(n), {"json": {}, "headers": {"Graphstash-Lease": "x"}}),
    "release": lambda n: ("DELETE", lease(n) + "?outcome=failed", {}),
    "put manifest": lambda n: ("PUT", f"/v1/{n}/manifests/m", {"json": {"keys": [KEY]}}),
    "delete": lambda n: ("DELETE", artifact(n), {}),
}
READS = ("get", "head", "lookup", "verify", "report", "get manifest")
WRITES = ("put", "acquire", "renew", "release", "put manifest")
ADMINS = ("delete",)


def call(client, name, namespace):
    method, path, more = CALLS[name](namespace)
    return client.request(method, path, **more)


def flat(routes):
    """Every route; later releases of FastAPI keep those of a router together."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from flat(inner.routes)


def plain(answer):
    """An answer without what differs between any two."""
    changing = {"date", "x-request-id"}
    headers = {name: value for name, value in answer.headers.items() if name not in changing}
    return answer.status_code, headers, answer.text.replace(answer.headers["x-request-id"], "ID")


@pytest.fixture
def stored(guarded, namespace):
    """A namespace with an artifact and a manifest in it."""
    admin = guarded.http(guarded.admin)
    assert call(admin, "put", namespace).status_code == 201
    assert call(admin, "put manifest", namespace).status_code == 201
    return namespace


# -- without credentials, or with wrong ones --


def test_every_call_that_is_not_open_requires_credentials(guarded, tmp_path):
    app = create_app(load_settings(data_dir=tmp_path))
    anonymous = guarded.http()
    asked, details = 0, set()
    for route in flat(app.routes):
        if route.path in OPEN:
            assert anonymous.get(route.path).status_code == 200
            continue
        if route.path in PAGES:
            continue
        assert isinstance(route, APIRoute), f"{route.path} is neither open nor a call of ours"
        for word in ("default", "NOT%20A%20WORD"):
            path = route.path
            for name in route.param_convertors:
                path = path.replace(f"{{{name}}}", word)
            for method in route.methods:
                answer = anonymous.request(method, path, content=b"{" * 10)
                assert answer.status_code == 401, f"{method} {path}"
                assert answer.headers["www-authenticate"] == 'Bearer realm="graphstash"'
                if method != "HEAD":
                    details.add(answer.json()["detail"])
                asked += 1
    assert asked > 2 * len(CALLS)
    assert len(details) == 2  # of calls, and of pages


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        "Bearer  " + "a" * 64,
        UNKNOWN,
        UNKNOWN + "A",
        UNKNOWN.replace("gst", "GST"),
        UNKNOWN.removeprefix("Bearer "),
        "Basic dXNlcjpwYXNzd29yZA==",
        "Bearer \xe9\xff",
        "Bearer " + "[" * 20_000,
        "Bearer a.b.c",
        "Digest username=x",
    ],
    ids=range(12),
)
def test_bad_credentials_get_the_same_answer_everywhere(guarded, stored, shown):
    client = guarded.http()
    headers = [(b"authorization", shown.encode("latin-1"))]
    answers = {
        repr(plain(client.get(path, headers=headers)))
        for path in (artifact(stored), artifact("NO WORD"), "/v1/stats", "/v1/-/access")
    }

    assert len(answers) == 1
    assert answers.pop().startswith("(401,")


def test_a_token_with_another_secret_is_refused(guarded):
    token = guarded.token("read:*")
    assert guarded.http(token).get("/v1/-/access").status_code == 200

    for last in "ABCD":
        changed = token[:-1] + last
        if changed != token:
            assert guarded.http(changed).get("/v1/-/access").status_code == 401
    assert guarded.http(token).get("/v1/-/access").status_code == 200


def test_callers_are_authenticated_before_the_body_is_read(guarded, namespace):
    head = f"PUT {artifact(namespace)} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with Wire(guarded.url) as wire:
        assert wire.ask(head.encode()).status == 401


def half_asked(guarded, method, path, token, *, body=b"", **headers):
    """A request whose body's second half is still to come; its socket."""
    host, port = guarded.url.removeprefix("http://").split(":")
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head += [f"Content-Length: {len(body)}", "Expect: 100-continue", "", ""]
    sent = socket.create_connection((host, int(port)), timeout=60)
    sent.sendall("\r\n".join(head).encode())
    assert sent.recv(65536).startswith(b"HTTP/1.1 100"), "let in: the body is being read"
    sent.sendall(body[: len(body) // 2])
    return sent


def revoke(guarded, token):
    """So that this process knows it at once."""
    answer = guarded.http(guarded.admin).delete(f"/v1/-/tokens/{token[4:20]}")
    assert answer.status_code == 204


BODIES = {
    "artifact": lambda n: ("PUT", artifact(n), BLOB),
    "manifest": lambda n: ("PUT", f"/v1/{n}/manifests/m", json.dumps({"keys": [KEY]}).encode()),
    "token": lambda n: (
        "POST",
        "/v1/-/tokens",
        json.dumps({"description": n, "grants": [{"scope": "admin", "namespaces": "*"}]}).encode(),
    ),
    "policy": lambda n: ("PUT", f"/v1/-/namespaces/{n}", b'{"anonymous_read": true}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_comes_in_slowly_does_not_outlive_its_token(guarded, namespace, name):
    method, path, body = BODIES[name](namespace)
    token = guarded.token("admin:*")
    with contextlib.closing(half_asked(guarded, method, path, token, body=body, **DIGEST)) as sent:
        revoke(guarded, token)
        sent.sendall(body[len(body) // 2 :])

        assert sent.recv(65536).startswith(b"HTTP/1.1 401")
    admin = guarded.http(guarded.admin)
    assert call(admin, "get", namespace).status_code == 404
    assert call(admin, "get manifest", namespace).status_code == 404
    assert admin.get(f"/v1/-/namespaces/{namespace}").status_code == 404
    listed = admin.get("/v1/-/tokens").json()["tokens"]
    assert namespace not in {each["description"] for each in listed}


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ({}, {"mode": "read_only"}, 403),
        ({}, {"trusted": True}, 403),
        ({}, {"max_artifact_bytes": 10}, 413),
        ({"mode": "overwrite"}, {}, 503),
    ],
)
def test_a_body_that_comes_in_slowly_does_not_outlive_the_rules(
    guarded, namespace, before, after, status
):
    guarded.set_policy(namespace, **before)
    method, path, body = BODIES["artifact"](namespace)
    token = guarded.token("write:*")
    with contextlib.closing(half_asked(guarded, method, path, token, body=body, **DIGEST)) as sent:
        guarded.set_policy(namespace, **after)
        sent.sendall(body[len(body) // 2 :])

        assert sent.recv(65536).startswith(f"HTTP/1.1 {status}".encode())
    assert call(guarded.http(guarded.admin), "get", namespace).status_code == 404


def test_a_waiter_whose_token_is_revoked_gets_no_lease(guarded, namespace):
    admin = guarded.http(guarded.admin)
    held = admin.post(lease(namespace), json={}).json()["token"]
    token = guarded.token(f"write:{namespace}")
    body = b"{ }"
    with contextlib.closing(
        half_asked(guarded, "POST", lease(namespace), token, body=body, Prefer="wait=60")
    ) as sent:
        sent.sendall(body[len(body) // 2 :])
        until(lambda: admin.get("/v1/stats").json()["waiters"])
        revoke(guarded, token)
        ended = admin.delete(
            lease(namespace) + "?outcome=failed", headers={"Graphstash-Lease": held}
        )
        assert ended.status_code == 204

        assert sent.recv(65536).startswith(b"HTTP/1.1 401")
    assert admin.post(lease(namespace), json={}).status_code == 201, "nobody holds it"


# -- what grants allow --


@pytest.mark.parametrize(
    ("grant", "allowed", "forbidden"),
    [
        ("read", READS, WRITES + ADMINS),
        ("write", READS + WRITES, ADMINS),
        ("admin", READS + WRITES + ADMINS, ()),
    ],
)
def test_a_scope_includes_only_the_scopes_below_it(guarded, stored, grant, allowed, forbidden):
    client = guarded.http(guarded.token(f"{grant}:{stored}"))

    for name in allowed:
        assert call(client, name, stored).status_code not in {401, 403}, name
    for name in forbidden:
        refused = call(client, name, stored)
        assert refused.status_code == 403, name
        needed = f"{'admin' if name in ADMINS else 'write'}:{stored}"
        assert needed in refused.json()["detail"]


def test_a_pattern_of_many_stars_is_matched_in_linear_time():
    """A search that goes back would take years: nothing here waits for a clock."""
    pattern = NamespacePattern("*a" * 31 + "b")

    assert not pattern.matches("a" * 64)
    assert NamespacePattern("*a*b*").matches("xxaxxbxx")
    assert NamespacePattern("*ab*ab").matches("abab")
    assert not NamespacePattern("*ab*ab").matches("ab")
    assert NamespacePattern("a*a").matches("aa")
    assert not NamespacePattern("a*a").matches("a")


def test_a_pattern_does_not_match_similar_names(guarded, namespace):
    client = guarded.http(guarded.token(f"write:{namespace}-*", f"read:x.{namespace}"))

    assert call(client, "put", f"{namespace}-a").status_code == 201
    assert call(client, "put", f"{namespace}-").status_code == 201
    assert call(client, "put", namespace).status_code == 404
    assert call(client, "put", f"a{namespace}-a").status_code == 404
    assert call(client, "put", f"x.{namespace}").status_code == 403
    assert call(client, "put", f"xx{namespace}").status_code == 404, "a dot is a dot"


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_cannot_tell_whether_an_artifact_exists(guarded, stored, name):
    stranger = guarded.http(guarded.token("admin:elsewhere", "read:*-not"))
    there = plain(call(stranger, name, stored))
    assert guarded.http(guarded.admin).delete(artifact(stored)).status_code == 204

    assert there == plain(call(stranger, name, stored))
    assert there[0] == 404


@pytest.mark.parametrize("name", ["get", "head", "get manifest"])
def test_a_stranger_gets_the_answer_that_a_reader_gets_for_an_absent_artifact(
    guarded, namespace, name
):
    reader = guarded.http(guarded.token(f"read:{namespace}"))
    stranger = guarded.http(guarded.token("read:elsewhere"))

    assert plain(call(stranger, name, namespace)) == plain(call(reader, name, namespace))


def test_a_stranger_changes_nothing(guarded, stored):
    stranger = guarded.http(guarded.token("admin:elsewhere"))
    admin = guarded.http(guarded.admin)
    before = admin.get("/v1/stats").json()["namespaces"]

    for name in CALLS:
        call(stranger, name, stored)
    assert stranger.put(artifact(stored, OTHER), content=BLOB, headers=DIGEST).status_code == 404

    assert admin.get(artifact(stored)).content == BLOB
    assert admin.get(artifact(stored, OTHER)).status_code == 404
    after = {each["namespace"]: each for each in admin.get("/v1/stats").json()["namespaces"]}
    (was,) = [each for each in before if each["namespace"] == stored]
    assert after[stored]["artifacts"] == was["artifacts"]
    assert after[stored]["puts"] == was["puts"]


def test_statistics_show_what_the_caller_may_read(guarded, stored):
    assert guarded.http(guarded.token("read:elsewhere")).get("/v1/stats").json()["namespaces"] == []
    mine = guarded.http(guarded.token(f"read:{stored}")).get("/v1/stats").json()
    assert [each["namespace"] for each in mine["namespaces"]] == [stored]


# -- what policies add --


def test_anonymous_read_gives_no_right_to_write(guarded, stored):
    guarded.set_policy(stored, anonymous_read=True)
    anonymous = guarded.http()

    for name in READS:
        assert call(anonymous, name, stored).status_code in {200, 204}, name
    for name in (*WRITES, *ADMINS):
        assert call(anonymous, name, stored).status_code == 401, name
    stranger = guarded.http(guarded.token("write:elsewhere"))
    assert stranger.get(artifact(stored)).content == BLOB
    assert call(stranger, "put", stored).status_code == 403
    stats = stranger.get("/v1/stats").json()["namespaces"]
    assert stored in [each["namespace"] for each in stats]


@pytest.mark.parametrize(
    ("grant", "status"),
    [("write:*", 403), ("write:{}*", 403), ("write:{}", 201), ("admin:*", 201), ("read:{}", 403)],
)
@pytest.mark.parametrize("name", ["put", "put manifest", "acquire"])
def test_a_trusted_namespace_takes_writes_from_exact_grants_only(
    guarded, namespace, grant, status, name
):
    guarded.set_policy(namespace, trusted=True)
    client = guarded.http(guarded.token(grant.format(namespace)))

    answer = call(client, name, namespace)

    assert answer.status_code == status
    if status == 403:
        assert f"write:{namespace}" in answer.json()["detail"]
        assert ("trusted" in answer.json()["detail"]) == grant.startswith("write")
        assert call(client, "lookup", namespace).status_code == 200


def test_refused_callers_do_not_count_towards_the_rate_of_a_namespace(guarded, stored):
    guarded.set_policy(stored, requests_per_second=0.01)
    stranger, anonymous = guarded.http(guarded.token("read:elsewhere")), guarded.http()
    for _ in range(5):
        assert call(stranger, "get", stored).status_code == 404
        assert call(anonymous, "get", stored).status_code == 401
    reader = guarded.http(guarded.token(f"read:{stored}"))

    assert call(reader, "get", stored).status_code == 200
    assert call(reader, "get", stored).status_code == 429


def test_a_server_without_authentication_allows_every_call(api, problem):
    shown = {"Authorization": UNKNOWN}

    assert api.http.get("/v1/-/access").json()["kind"] == "open"
    assert api.put(BLOB).status_code == 201
    assert api.http.get(api.path(), headers=shown).content == BLOB
    assert api.http.delete(api.path(), headers=shown).status_code == 204


# -- what is known about a token, and for how long --


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def statements():
    """Every statement that names tokens."""
    with recorded("tokens") as seen:
        yield seen


@pytest.fixture
async def services(database_url, clock):
    """What decides about tokens, and what makes them, on a database of its own."""
    database = Database(database_url)
    access = AccessService(
        is_open=False,
        tokens=KnownTokens(database=database, clock=clock),
        oidc=None,
        accounting=Accounting(database=database, counters=Counters.alone(), clock=clock),
        clock=clock,
    )
    yield access, TokenService(database=database, clock=clock)
    await database.close()


async def new_token(tokens, **terms):
    request = TokenRequest(description="a test", grants=(Grant.parse("read:*"),), **terms)
    return await tokens.create(request, actor=ACTOR)


async def is_let_in(access, token):
    try:
        return (await access.principal_of(f"Bearer {token}")).kind is AccessKind.TOKEN
    except ServerError as error:
        if error.status != 401:
            raise
        return False


async def test_a_known_token_needs_no_database_query(services, clock, statements):
    access, tokens = services
    token = (await new_token(tokens)).token
    statements.clear()
    for _ in range(100):
        assert await is_let_in(access, token)
    assert len(statements) == 1
    clock.turn(MAX_DECISION_AGE.total_seconds())
    assert await is_let_in(access, token)
    assert len(statements) == 2


async def test_concurrent_requests_with_one_token_share_one_statement(services, statements):
    access, tokens = services
    token = (await new_token(tokens)).token
    statements.clear()
    assert all(await asyncio.gather(*(is_let_in(access, token) for _ in range(200))))
    assert len(statements) == 1


async def test_a_revocation_takes_effect_when_the_cached_decision_expires(services, clock):
    access, tokens = services
    issued = await new_token(tokens)
    assert await is_let_in(access, issued.token)
    await tokens.revoke(issued.info.id, actor=ACTOR)
    clock.turn(MAX_DECISION_AGE.total_seconds() - 0.001)
    assert await is_let_in(access, issued.token)
    clock.turn(0.001)
    assert not await is_let_in(access, issued.token)


async def test_a_revocation_in_the_same_process_takes_effect_at_once(services):
    access, tokens = services
    issued = await new_token(tokens)
    assert await is_let_in(access, issued.token)
    await tokens.revoke(issued.info.id, actor=ACTOR)
    access.forget_token(issued.info.id)
    assert not await is_let_in(access, issued.token)


async def test_a_query_from_before_a_revocation_is_not_used_after_it(services, monkeypatch):
    access, tokens = services
    issued = await new_token(tokens)
    has_looked, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(connection, ids):
        rows = await find_tokens(connection, ids)
        has_looked.set()
        await may_go_on.wait()
        return rows

    monkeypatch.setattr("graphstash_server.services.identity.authentication.find_tokens", slow)
    first = asyncio.create_task(is_let_in(access, issued.token))
    await has_looked.wait()
    await tokens.revoke(issued.info.id, actor=ACTOR)
    access.forget_token(issued.info.id)
    second = asyncio.create_task(is_let_in(access, issued.token))
    await asyncio.sleep(0)
    may_go_on.set()

    assert await asyncio.gather(first, second) == [False, False]
    assert not await is_let_in(access, issued.token)


async def test_a_clock_that_is_set_back_does_not_extend_cached_decisions(services, clock):
    access, tokens = services
    issued = await new_token(tokens)
    assert await is_let_in(access, issued.token)
    await tokens.revoke(issued.info.id, actor=ACTOR)
    clock.turn(-3600)
    assert not await is_let_in(access, issued.token)


async def test_expiry_is_checked_on_every_use(services, clock, statements):
    access, tokens = services
    expires_at = clock.now + timedelta(seconds=1)
    token = (await new_token(tokens, expires_at=expires_at)).token
    assert await is_let_in(access, token)
    asked = len(statements)
    clock.turn(1)
    assert not await is_let_in(access, token)
    assert len(statements) == asked, "what is known was enough"


async def test_guesses_share_statements_and_are_remembered(services, statements):
    access, tokens = services
    token = (await new_token(tokens)).token
    alphabet = "abcdefghijklmnopqrst"
    guesses = [f"gst_{'z' * 14}{a}{b}_{'A' * 43}" for a in alphabet for b in alphabet]
    assert await is_let_in(access, token)
    statements.clear()
    for _ in range(3):
        found = await asyncio.gather(*(is_let_in(access, guess) for guess in guesses))
        assert not any(found)
    assert 1 <= len(statements) <= 2, f"{len(guesses)} guesses, three times"
    assert await is_let_in(access, token)
    assert len(statements) <= 2, "the good one is still known"


async def test_the_cache_of_unknown_tokens_is_bounded(services, monkeypatch):
    access, tokens = services
    monkeypatch.setattr("graphstash_server.services.identity.authentication._MAX_UNKNOWN", 10)
    issued = await new_token(tokens)
    assert await is_let_in(access, issued.token)
    guesses = [f"gst_{'z' * 15}{last}_{'A' * 43}" for last in "abcdefghijklmnopqrst"]
    await asyncio.gather(*(is_let_in(access, guess) for guess in guesses))
    assert len(access.tokens._unknown) == 10
    assert list(access.tokens._known) == [issued.info.id]


def test_a_server_whose_database_is_gone_answers_503_and_not_401(tmp_path, problem, postgres):
    """Any other answer would tell a job that its token is bad."""
    url = postgres.new_database()
    with Guarded(tmp_path, database_url=url) as guarded:
        token = guarded.token("read:*")
        name = url.rpartition("/")[2]
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        postgres.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        )
        refused = guarded.http(token).get("/v1/-/access")
        postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

        problem(refused, 503, "unavailable", "database")
        assert guarded.http(token).get("/v1/-/access").status_code == 200
