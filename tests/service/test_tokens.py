"""Creating, listing, using and revoking tokens, without storing or logging secrets."""

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import sqlalchemy as sa

from graphstash_schema import TOKEN_FORM
from graphstash_server.db.engine import make_engine
from graphstash_server.db.tables import metadata
from graphstash_server.services.identity import tokens as tokens_module
from graphstash_server.settings import load_settings
from support.processes import captured, graphstash_here
from support.services import ACTOR, new_token
from support.tokens import Guarded, issue
from support.waiting import until

pytestmark = pytest.mark.anyio

READ_ALL = [{"scope": "read", "namespaces": "*"}]
AUTHENTICATION = "graphstash_server.services.identity.authentication."


@pytest.fixture
def admin(guarded):
    return guarded.http(guarded.admin)


def make(admin, **changed):
    wanted = {"description": "a job", "grants": READ_ALL} | changed
    return admin.post("/v1/-/tokens", json=wanted)


@pytest.mark.sql
def test_new_token_is_valid_at_once_and_its_secret_is_not_stored(guarded, admin):
    made = make(admin, description="listed")

    token, info = made.json()["token"], made.json()["info"]
    secret = TOKEN_FORM.fullmatch(token)["secret"]
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    assert TOKEN_FORM.fullmatch(token)["id"] == info["id"]

    def listed():
        tokens = admin.get("/v1/-/tokens")
        assert "sha256" not in tokens.text
        assert secret not in tokens.text
        return next(each for each in tokens.json()["tokens"] if each["id"] == info["id"])

    assert listed()["description"] == "listed"
    assert listed()["created_by"].endswith(" admin")
    assert listed()["last_used_at"] is None
    assert guarded.http(token).get("/v1/-/access").json() == {
        "kind": "token",
        "name": f"token:{info['id']} listed",
        "grants": READ_ALL,
        "expires_at": None,
        "issuer": None,
        "subject": None,
        "token": info["id"],
    }
    until(lambda: listed()["last_used_at"] is not None)

    kept = whole_database(guarded.database_url)
    assert info["id"] in kept
    assert secret not in kept
    # grep runs in another process: a process that closes a file of its own SQLite database loses
    # its locks on the file.
    found = captured(["grep", "-r", "--fixed-strings", "-e", secret, guarded.server.data_dir])
    assert (found.returncode, found.stdout) == (1, ""), "grep exits with 1 if it finds nothing"


def whole_database(url):
    async def read():
        engine = make_engine(sa.make_url(url))
        async with engine.connect() as connection:
            return [
                str((await connection.execute(sa.select(table))).all())
                for table in metadata.sorted_tables
            ]

    return "\n".join(asyncio.run(read()))


def test_server_without_authentication_creates_no_tokens(server):
    with httpx.Client(base_url=server.url) as anybody:
        answer = make(anybody, grants=[{"scope": "admin", "namespaces": "*"}])

        assert answer.status_code == 403
        assert "graphstash token create" in answer.json()["detail"]
        assert anybody.get("/v1/-/tokens").json()["tokens"] == []


@pytest.mark.sql
async def test_long_expired_tokens_are_deleted(opened):
    ends = (None, None, timedelta(hours=1), timedelta(days=5))  # the minimum is 30 days
    async with opened(audit_days=2) as server:
        tokens = server.context.tokens
        made = [await new_token(tokens, expires_at=end and opened.clock.now + end) for end in ends]
        await tokens.revoke(made[1].info.id, actor=ACTOR)
        await server.context.maintenance.run_once()
        opened.clock.turn(31 * 24 * 3600)
        await server.context.maintenance.run_once()
        left = {each.id for each in (await tokens.list_all()).tokens}

    assert [each.info.id in left for each in made] == [True, False, False, True]


def test_malformed_token_is_neither_created_nor_revoked(admin, problem):
    for expires_at in (
        *("2020-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"),
        *("0001-01-01T00:00:00+12:00", "2040-01-01T00:00:00"),
    ):
        problem(make(admin, expires_at=expires_at), 400, "invalid_request", "expires_at")
    for changed in ({"grants": []}, {"description": "a\x1b[2J\x00b"}, {"secret": "mine"}):
        problem(make(admin, **changed), 400, "invalid_request")
    for name in ("a" * 16, "A", "a" * 5000, "%27%20OR%201=1", "..", "%00"):
        assert admin.delete(f"/v1/-/tokens/{name}").status_code in {400, 404}


def test_revoked_token_is_refused_at_once_and_logged_once(guarded, admin, monkeypatch):
    for age in ("MAX_DECISION_AGE", "_RENEWED_AGE"):
        monkeypatch.setattr(AUTHENTICATION + age, timedelta(days=1))
    made = make(admin).json()
    token_id = made["info"]["id"]
    used = guarded.http(made["token"])
    assert used.get("/v1/-/access").status_code == 200

    assert [admin.delete(f"/v1/-/tokens/{token_id}").status_code for _ in range(2)] == [204] * 2

    assert used.get("/v1/-/access").status_code == 401
    logged = admin.get("/v1/-/audit").json()["entries"]
    assert [each["action"] for each in logged if each["subject"] == token_id] == [
        *("token_revoke", "token_create")
    ]
    listed = admin.get("/v1/-/tokens").json()["tokens"]
    assert next(each for each in listed if each["id"] == token_id)["revoked_at"] is not None


def test_revocation_reaches_other_servers_by_notification(tmp_path, postgres, monkeypatch):
    """Cached decisions do not expire here, so only the notification can end one."""
    for age in ("MAX_DECISION_AGE", "_RENEWED_AGE"):
        monkeypatch.setattr(AUTHENTICATION + age, timedelta(days=1))
    url = postgres.new_database()
    with (
        Guarded(tmp_path / "1", database_url=url) as first,
        Guarded(tmp_path / "2", database_url=url) as second,
    ):
        context = second.server._server.config.app.state.context
        until(lambda: context.wait_queue.are_informed)
        issued = issue(url, "read:*")
        used = second.http(issued.token)
        assert used.get("/v1/-/access").status_code == 200

        first.http(first.admin).delete(f"/v1/-/tokens/{issued.info.id}")

        until(lambda: used.get("/v1/-/access").status_code == 401)


def test_number_of_live_tokens_is_limited(guarded, admin, problem, monkeypatch):
    first = make(admin).json()["info"]["id"]
    now = datetime.now(UTC)
    live = [
        each
        for each in admin.get("/v1/-/tokens").json()["tokens"]
        if each["revoked_at"] is None
        and (each["expires_at"] is None or datetime.fromisoformat(each["expires_at"]) > now)
    ]
    monkeypatch.setattr(tokens_module, "MAX_LIVE_TOKENS", len(live))

    problem(make(admin), 409, "conflict", "revoke some")
    admin.delete(f"/v1/-/tokens/{first}")
    assert make(admin).status_code == 201


def test_log_contains_no_token_of_a_request(start):
    server = start("--auth", "tokens", "--log-level", "debug", "--access-log")
    settings = load_settings(data_dir=server.data_dir)
    assert "a token as GRAPHSTASH_TOKEN: GRAPHSTASH_DATA_DIR=" in server.log
    issued = issue(settings.database_url, "admin:*")
    secret = TOKEN_FORM.fullmatch(issued.token)["secret"]
    for shown in (issued.token, issued.token[:-1] + "A", f"gst_{'a' * 16}_{secret}", secret):
        headers = {"Authorization": f"Bearer {shown}"}
        for path in ("/v1/-/access", "/v1/-/tokens", "/v1/team/manifests/m", "/v1/stats"):
            httpx.get(server.url + path, headers=headers, trust_env=False)
    assert server.stop() == 0

    assert "/v1/-/access" in server.log
    assert secret[:-1] not in server.log


@pytest.fixture
def command(guarded):
    """Run `graphstash ...` on the server's database."""

    def run(*arguments, status=0):
        done = graphstash_here(
            *arguments,
            GRAPHSTASH_DATA_DIR=str(guarded.server.data_dir),
            GRAPHSTASH_DATABASE_URL=guarded.database_url,
        )
        assert done.returncode == status, done.stderr
        return done

    return run


def test_commands_create_list_and_revoke_tokens(guarded, command):
    made = command(
        *("token", "create", "--grant", "write:team-*", "--grant", "read:*"),
        *("--description", "to [red]go[/red]", "--expires", "90d"),
    )
    token = made.stdout.removesuffix("\n")
    form = TOKEN_FORM.fullmatch(token)
    assert "write:team-*, read:*" in made.stderr
    assert token not in made.stderr
    access = guarded.http(token).get("/v1/-/access").json()
    assert access["grants"] == [
        {"scope": "write", "namespaces": "team-*"},
        {"scope": "read", "namespaces": "*"},
    ]
    left = datetime.fromisoformat(access["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < left <= timedelta(days=90)

    shown = command("token", "list").stdout
    described = r"to \[red\]go\[/red\]  +write:team-\*, read:\*  .*valid until "
    assert re.search(rf"^{form['id']}  {described}", shown, re.MULTILINE)
    whole = command("token", "revoke", token).stdout
    assert form["id"] in whole
    assert form["secret"] not in whole
    listed = json.loads(command("token", "list", "--json").stdout)["tokens"]
    assert next(each for each in listed if each["id"] == form["id"])["revoked_at"]
    for unknown in ("a" * 16, f"gst_{'a' * 16}_{form['secret']}"):
        refused = command("token", "revoke", unknown, status=1)
        assert f"there is no token {'a' * 16}:" in refused.stderr
        assert form["secret"] not in refused.stdout + refused.stderr

    create = ("token", "create", "--grant", "read:*", "--description", "x", "--json")
    made = json.loads(command(*create, "--expires", "2199-01-01").stdout)
    assert made["info"]["expires_at"].startswith("2199-01-01T00:00:00")


def test_command_names_invalid_argument(command):
    for grant, expires, status, named in (
        ("write", "90d", 2, "read:<pattern>"),
        ("own:*", "90d", 2, "read:<pattern>"),
        ("write:Team", "90d", 2, "namespace pattern"),
        ("write:team", "soon", 2, "soon"),
        ("write:team", "99999999999d", 2, "99999999999d"),
        ("write:team", "2020-01-01", 1, "2020-01-01"),
    ):
        options = ["create", "--grant", grant, "--description", "x", "--expires", expires]
        refused = command("token", *options, status=status)
        assert named in refused.stdout + refused.stderr
        assert "gst_" not in refused.stdout + refused.stderr
