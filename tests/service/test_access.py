"""Rights of callers and namespaces, and how the server looks up tokens."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from fastapi.routing import APIRoute

from graphstash_schema import AccessKind, ErrorCode, NamespacePattern
from graphstash_server.app import create_app
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.tokens import find_tokens, find_unrevoked
from graphstash_server.errors import ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.counters import Counters
from graphstash_server.services.identity.authentication import (
    MAX_DECISION_AGE,
    AccessService,
    KnownTokens,
)
from graphstash_server.services.identity.tokens import TokenService
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.settings import load_settings
from support.api import digest_header
from support.services import ACTOR, FakeClock, new_token
from support.statements import recorded
from support.tokens import Guarded
from support.waiting import until
from support.wire import Wire, head

BLOB = b"x" * 1000
OPEN = {"/healthz", "/readyz", "/openapi.json"}
PAGES = {"/", "/search", "/tuning", "/docs", "/sign-in", "/sign-out", "/assets/{name}"}
"""Pages apply the visitor's rights: see test_pages, test_sign_in and test_actions."""
UNKNOWN = f"gst_{'a' * 16}_{'A' * 43}"

pytestmark = pytest.mark.anyio


def manifest(api):
    return f"/v1/{api.namespace}/manifests/m"


READS = {
    "get": lambda api: api.get(),
    "head": lambda api: api.head(),
    "lookup": lambda api: api.call("lookup", {"keys": [api.key()]}),
    "verify": lambda api: api.call("verify", api.key()),
    "report": lambda api: api.report(BLOB),
    "get manifest": lambda api: api.http.get(manifest(api)),
}
WRITES = {
    "put": lambda api: api.put(BLOB),
    "acquire": lambda api: api.acquire(ttl_seconds=1),
    "renew": lambda api: api.renew("x"),
    "release": lambda api: api.release("x", "failed"),
    "put manifest": lambda api: api.http.put(manifest(api), json={"keys": [api.key()]}),
}
ADMINS = {
    "delete": lambda api: api.delete(),
    "release artifact": lambda api: api.call("release", api.key()),
    "list withheld": lambda api: api.http.get(f"/v1/-/quarantine?namespace={api.namespace}"),
}
OF_SERVER = {
    "set policy": lambda api: api.http.put(f"/v1/-/namespaces/{api.namespace}", json={}),
    "remove policy": lambda api: api.http.delete(f"/v1/-/namespaces/{api.namespace}"),
    "revoke token": lambda api: api.http.delete(f"/v1/-/tokens/{'a' * 16}"),
}


@pytest.fixture
def admin(guarded, namespace):
    """An administrator's `Api` in a namespace of the test."""
    return guarded.api(namespace)


@pytest.fixture
def stored(admin):
    """The name of a namespace that holds an artifact and a manifest."""
    for name in ("put", "put manifest"):
        assert WRITES[name](admin).status_code == 201
    return admin.namespace


# -- without credentials, or with wrong ones --


def flat(routes):
    """Return all routes. Later releases of FastAPI nest the routes of a router."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from flat(inner.routes)


@pytest.mark.parametrize("shown", [None, UNKNOWN])
def test_every_call_except_open_ones_requires_credentials(guarded, tmp_path, shown):
    """tests/attacks/test_stolen_tokens.py covers credentials in invalid forms."""
    app = create_app(load_settings(data_dir=tmp_path))
    caller = guarded.http(shown)
    asked, details = 0, set()
    for route in flat(app.routes):
        if route.path in OPEN:
            assert caller.get(route.path).status_code == 200
            continue
        if route.path in PAGES or route.path.startswith("/actions/"):
            continue
        assert isinstance(route, APIRoute), f"{route.path} is neither open nor a call of the API"
        for word in ("default", "NOT%20A%20WORD"):
            path = route.path
            for name in route.param_convertors:
                path = path.replace(f"{{{name}}}", word)
            for method in route.methods:
                answer = caller.request(method, path, content=b"{" * 10)
                assert answer.status_code == 401, f"{method} {path}"
                assert answer.headers["www-authenticate"] == 'Bearer realm="graphstash"'
                if method != "HEAD":
                    details.add(answer.json()["detail"])
                asked += 1
    assert asked > 24
    assert len(details) == (2 if shown is None else 1)  # one for calls, one for pages


@contextlib.contextmanager
def half_sent(guarded, method, path, token, *, body, **headers):
    """Send half of a body. Return a function that sends the rest and returns the status."""
    sent = [f"{name}: {value}" for name, value in headers.items()]
    sent += [f"Content-Length: {len(body)}", "Expect: 100-continue"]
    with Wire(guarded.url) as wire:
        wire.send(head(method, path, *sent, token=token))
        assert wire.begin() == 100, "the server waits for the body"
        wire.send(body[: len(body) // 2])
        yield lambda: wire.ask(body[len(body) // 2 :]).status


def revoke(guarded, token):
    """Revoke a token, without delay for this process."""
    answer = guarded.http(guarded.admin).delete(f"/v1/-/tokens/{token[4:20]}")
    assert answer.status_code == 204


def json_of(**fields):
    return json.dumps(fields).encode()


EVERYTHING = {"scope": "admin", "namespaces": "*"}
BODIES = {
    "artifact": lambda api: (api.path(), BLOB),
    "manifest": lambda api: (manifest(api), json_of(keys=[api.key()])),
    "token": lambda api: ("/v1/-/tokens", json_of(description=api.namespace, grants=[EVERYTHING])),
    "policy": lambda api: (f"/v1/-/namespaces/{api.namespace}", json_of(anonymous_read=True)),
}


@pytest.mark.parametrize("name", BODIES)
def test_slow_upload_is_refused_after_its_token_is_revoked(guarded, admin, name):
    path, body = BODIES[name](admin)
    method = "POST" if name == "token" else "PUT"
    token = guarded.token("admin:*")
    with half_sent(guarded, method, path, token, body=body, **digest_header(body)) as finish:
        revoke(guarded, token)
        assert finish() == 401
    assert admin.get().status_code == 404
    assert READS["get manifest"](admin).status_code == 404
    assert admin.http.get(f"/v1/-/namespaces/{admin.namespace}").status_code == 404
    listed = admin.http.get("/v1/-/tokens").json()["tokens"]
    assert admin.namespace not in {each["description"] for each in listed}


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ({}, {"mode": "read_only"}, 403),
        ({}, {"trusted": True}, 403),
        ({}, {"max_artifact_bytes": 10}, 413),
        ({"mode": "overwrite"}, {}, 503),
    ],
)
def test_slow_upload_is_refused_after_policy_change(guarded, admin, before, after, status):
    guarded.set_policy(admin.namespace, **before)
    path, token = admin.path(), guarded.token("write:*")
    with half_sent(guarded, "PUT", path, token, body=BLOB, **digest_header(BLOB)) as finish:
        guarded.set_policy(admin.namespace, **after)
        assert finish() == status
    assert admin.get().status_code == 404


SLOW_WRITES = {
    "manifest": lambda api: ("PUT", manifest(api), json_of(keys=[api.key()])),
    "lease": lambda api: ("POST", api.lease_path(), b"{ }"),
    "description": lambda api: (
        "POST",
        f"/v1/{api.namespace}/artifacts:describe",
        json_of(artifacts=[{"key": api.key(), "label": "", "program": {}, "environment": {}}]),
    ),
}


@pytest.mark.parametrize("name", SLOW_WRITES)
def test_slow_write_is_refused_after_its_namespace_became_read_only(guarded, admin, name):
    method, path, body = SLOW_WRITES[name](admin)
    with half_sent(guarded, method, path, guarded.token("write:*"), body=body) as finish:
        guarded.set_policy(admin.namespace, mode="read_only")
        assert finish() == 403
    assert READS["get manifest"](admin).status_code == 404


def test_waiter_whose_token_is_revoked_gets_no_lease(guarded, admin):
    held = admin.acquire().json()["token"]
    token = guarded.token(f"write:{admin.namespace}")
    with (
        half_sent(
            guarded, "POST", admin.lease_path(), token, body=b"{ }", Prefer="wait=60"
        ) as finish,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(finish)
        until(lambda: admin.http.get("/v1/stats").json()["waiters"])
        revoke(guarded, token)
        assert admin.release(held, "failed").status_code == 204
        assert answer.result() == 401
    assert admin.acquire().status_code == 201, "no caller holds the lease"


def answer_after_namespace_became_read_only(guarded, admin, held):
    """Return the answer to a waiter whose namespace becomes read-only before it is its turn."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(admin.acquire, wait=60)
        until(lambda: admin.http.get("/v1/stats").json()["waiters"])
        guarded.set_policy(admin.namespace, mode="read_only")
        assert admin.release(held, "failed").status_code == 204
        return answer.result()


def test_waiter_in_a_read_only_namespace_gets_403_even_if_its_lease_cannot_be_released(
    guarded, admin, monkeypatch, caplog
):
    held = admin.acquire().json()["token"]
    release = LeaseService.release

    async def failing(leases, key, *, token):
        if token != held:
            raise ServerError(ErrorCode.UNAVAILABLE, "failed by this test")
        await release(leases, key, token=token)

    monkeypatch.setattr(LeaseService, "release", failing)
    assert answer_after_namespace_became_read_only(guarded, admin, held).status_code == 403
    assert "failed by this test" in caplog.text


def test_waiter_in_a_namespace_that_became_read_only_gets_no_lease(guarded, admin):
    held = admin.acquire().json()["token"]
    assert answer_after_namespace_became_read_only(guarded, admin, held).status_code == 403
    guarded.set_policy(admin.namespace, mode="write_once")
    assert admin.acquire().status_code == 201, "no caller holds the lease"


# -- grants --


@pytest.mark.parametrize(
    ("grant", "allowed", "forbidden"),
    [
        ("read", READS, WRITES | ADMINS),
        ("write", READS | WRITES, ADMINS),
        ("admin", READS | WRITES | ADMINS, {}),
    ],
)
def test_scope_includes_only_the_scopes_below_it(guarded, stored, grant, allowed, forbidden):
    api = guarded.api(stored, f"{grant}:{stored}")

    for name, call in allowed.items():
        assert call(api).status_code not in {401, 403}, name
    for name, call in forbidden.items():
        refused = call(api)
        assert refused.status_code == 403, name
        needed = f"{'admin' if name in ADMINS else 'write'}:{stored}"
        assert needed in refused.json()["detail"]
    for name, call in OF_SERVER.items():
        assert call(api).status_code == 403, name


def test_pattern_of_many_stars_is_matched_in_linear_time():
    """A backtracking matcher would take years, so this test needs no clock."""
    pattern = NamespacePattern("*a" * 31 + "b")

    assert not pattern.matches("a" * 64)
    assert NamespacePattern("*a*b*").matches("xxaxxbxx")
    assert NamespacePattern("*ab*ab").matches("abab")
    assert not NamespacePattern("*ab*ab").matches("ab")
    assert NamespacePattern("a*a").matches("aa")
    assert not NamespacePattern("a*a").matches("a")
    for other, name in (
        *(("team-*", "team"), ("team-*", "teams-a"), ("team", "team-a")),
        *(("*-team", "a-team-b"), ("team.x", "team-x"), ("te*am", "team-x")),
    ):
        assert not NamespacePattern(other).matches(name), other


# -- policies --


def test_public_namespace_is_read_by_every_caller(guarded, connect, stored):
    guarded.set_policy(stored, anonymous_read=True)
    anonymous, stranger = connect(guarded.url, stored), guarded.api(stored, "write:elsewhere")
    closed = connect(guarded.url, f"{stored}-closed")
    assert guarded.api(closed.namespace).put(BLOB).status_code == 201

    for name, call in READS.items():
        assert call(anonymous).status_code in {200, 204}, name
    assert stranger.get().content == BLOB
    assert stranger.put(BLOB).status_code == 403
    assert stranger.stats()
    for api, calls in ((anonymous, WRITES | ADMINS | OF_SERVER), (closed, READS)):
        assert {name for name, call in calls.items() if call(api).status_code != 401} == set()


def test_refused_callers_do_not_count_towards_the_rate_of_a_namespace(guarded, connect, stored):
    guarded.set_policy(stored, requests_per_second=0.01)
    stranger, anonymous = guarded.api(stored, "read:elsewhere"), connect(guarded.url, stored)
    for _ in range(5):
        assert stranger.get().status_code == 404
        assert anonymous.get().status_code == 401
    reader = guarded.api(stored, f"read:{stored}")

    assert reader.get().status_code == 200
    assert reader.get().status_code == 429


def test_server_without_authentication_allows_every_call(api):
    api.http.headers["Authorization"] = f"Bearer {UNKNOWN}"

    assert api.http.get("/v1/-/access").json()["kind"] == "open"
    assert api.put(BLOB).status_code == 201
    assert api.get().content == BLOB
    assert api.delete().status_code == 204


# -- cached tokens, and for how long they are valid --


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def statements():
    """Record every statement on the table of tokens."""
    with recorded("tokens") as seen:
        yield seen


@pytest.fixture
async def services(database_url, clock):
    """The services that check and create tokens, on an empty database."""
    database = Database(database_url)
    access = AccessService(
        is_open=False,
        tokens=KnownTokens(database=database, clock=clock),
        oidc=None,
        accounting=Accounting(
            database=database, counters=Counters.alone(), clock=clock, bound_time=lambda at: at
        ),
        clock=clock,
    )
    yield access, TokenService(database=database, clock=clock)
    await database.close()


async def is_let_in(access, token):
    try:
        return (await access.principal_of(f"Bearer {token}")).kind is AccessKind.TOKEN
    except ServerError as error:
        if error.status != 401:
            raise
        return False


async def test_cached_decision_needs_no_statement_and_ends_in_time(services, clock, statements):
    access, tokens = services
    here, elsewhere = [await new_token(tokens) for _ in range(2)]
    statements.clear()
    for issued in (here, elsewhere):
        assert all(await asyncio.gather(*(is_let_in(access, issued.token) for _ in range(200))))
        assert await is_let_in(access, issued.token)
    assert len(statements) == 2
    for issued in (here, elsewhere):
        await tokens.revoke(issued.info.id, actor=ACTOR)

    access.forget_token(here.info.id)  # as in the process that revokes
    assert not await is_let_in(access, here.token)
    clock.turn(MAX_DECISION_AGE.total_seconds() - 0.001)
    assert await is_let_in(access, elsewhere.token)
    clock.turn(0.001)
    assert not await is_let_in(access, elsewhere.token)


def knows(access, issued):
    """Return whether a decision needs no query."""
    return access.principal_now(f"Bearer {issued.token}") is not None


async def renewed(access):
    await access.tokens._renewal


async def test_one_statement_renews_all_tokens_in_use(services, clock, statements):
    access, tokens = services
    unused, revoked, *used = [await new_token(tokens) for _ in range(40)]
    assert await is_let_in(access, unused.token)
    clock.turn(60)
    assert all([await is_let_in(access, each.token) for each in (revoked, *used)])
    statements.clear()
    for _ in range(3):
        clock.turn(1)
        for each in used:
            assert knows(access, each)
        await renewed(access)
    assert len(statements) == 3
    assert "count" in statements[0].sql

    await tokens.revoke(revoked.info.id, actor=ACTOR)
    statements.clear()
    assert knows(access, revoked), "read less than two seconds ago"
    clock.turn(1)
    assert knows(access, used[0])
    await renewed(access)
    assert not knows(access, revoked)
    assert len(statements) == 2
    clock.turn(1.5)
    assert all(knows(access, each) for each in used)
    assert not knows(access, unused)
    assert not await is_let_in(access, revoked.token)
    await renewed(access)


async def test_renewal_does_not_undo_a_revocation_during_it(services, clock, monkeypatch):
    access, tokens = services
    issued, other = [await new_token(tokens) for _ in range(2)]
    assert all([await is_let_in(access, each.token) for each in (issued, other)])

    async def slow(source, ids):
        found = await find_unrevoked(source, ids)
        await tokens.revoke(issued.info.id, actor=ACTOR)
        access.forget_token(issued.info.id)
        return found

    monkeypatch.setattr("graphstash_server.services.identity.authentication.find_unrevoked", slow)
    clock.turn(1)
    assert knows(access, issued)
    await renewed(access)
    assert not knows(access, issued)
    assert not await is_let_in(access, issued.token)
    assert knows(access, other)


async def test_look_up_of_new_token_does_not_wait_for_a_renewal(services, clock, monkeypatch):
    access, tokens = services
    issued, new = [await new_token(tokens) for _ in range(2)]
    assert await is_let_in(access, issued.token)
    may_go_on, calls = asyncio.Event(), []

    async def slow(source, ids):
        calls.append(ids)
        await may_go_on.wait()
        return await find_unrevoked(source, ids)

    monkeypatch.setattr("graphstash_server.services.identity.authentication.find_unrevoked", slow)
    for _ in range(3):
        clock.turn(1)
        assert await is_let_in(access, issued.token)
        await asyncio.sleep(0)  # a renewal begins
    async with asyncio.timeout(20):
        assert await is_let_in(access, new.token)
    assert calls == [[issued.info.id]]
    may_go_on.set()
    await renewed(access)
    clock.turn(0.5)
    assert knows(access, issued)
    await renewed(access)
    assert len(calls) == 2


async def test_failed_renewal_is_retried_later_and_extends_no_decision(
    services, clock, monkeypatch
):
    access, tokens = services
    issued = await new_token(tokens)
    assert await is_let_in(access, issued.token)
    asked = []

    async def failing(_source, ids):
        asked.append(ids)
        raise ServerError(ErrorCode.UNAVAILABLE, "the database is down")

    monkeypatch.setattr(
        "graphstash_server.services.identity.authentication.find_unrevoked", failing
    )
    clock.turn(1)
    for _ in range(10):
        assert knows(access, issued)
        await renewed(access)
    assert asked == [[issued.info.id]]
    clock.turn(1)
    assert not knows(access, issued)
    assert await is_let_in(access, issued.token), "the query of this token alone does not fail"


async def test_query_that_began_before_a_revocation_is_not_used_after_it(services, monkeypatch):
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


async def test_expiry_is_checked_on_every_use(services, clock, statements):
    access, tokens = services
    expires_at = clock.now + timedelta(seconds=1)
    token = (await new_token(tokens, expires_at=expires_at)).token
    assert await is_let_in(access, token)
    assert access.principal_now(f"Bearer {token}") is not None
    asked = len(statements)
    clock.turn(1)
    assert not await is_let_in(access, token)
    assert access.principal_now(f"Bearer {token}") is None
    assert len(statements) == asked, "the cached token sufficed"


async def test_guesses_share_statements_and_take_bounded_memory(services, statements, monkeypatch):
    access, tokens = services
    issued = await new_token(tokens)
    alphabet = "abcdefghijklmnopqrst"
    guesses = [f"gst_{'z' * 14}{a}{b}_{'A' * 43}" for a in alphabet for b in alphabet]
    assert await is_let_in(access, issued.token)
    statements.clear()
    for _ in range(3):
        found = await asyncio.gather(*(is_let_in(access, guess) for guess in guesses))
        assert not any(found)
    assert await is_let_in(access, issued.token)
    assert 1 <= len(statements) <= 2, f"{len(guesses)} guesses, three times"

    access.tokens._unknown.clear()
    monkeypatch.setattr("graphstash_server.services.identity.authentication._MAX_UNKNOWN", 10)
    await asyncio.gather(*(is_let_in(access, guess) for guess in guesses[:20]))
    assert len(access.tokens._unknown) == 10
    assert list(access.tokens._known) == [issued.info.id]


def test_server_without_database_answers_503_instead_of_401(tmp_path, problem, postgres):
    """Any other answer would make a job report a bad token."""
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
