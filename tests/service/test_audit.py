"""The audit log: its entries, its pages, and their retention."""

import contextlib
import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from graphstash_schema import AuditAction, Namespace
from graphstash_server.actor import MAX_ACTOR_CHARACTERS, Actor
from graphstash_server.clock import system_clock
from graphstash_server.commands.audit import audit
from graphstash_server.context import open_services
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.services.identity import audit as audit_module
from graphstash_server.services.identity.audit import AuditService
from graphstash_server.settings import load_settings
from support.commands import invoke

pytestmark = pytest.mark.anyio

START = datetime(2030, 1, 1, tzinfo=UTC)


def records(count, *, at=START):
    """Return one record for each minute, in two namespaces by turns."""
    return [
        AuditRecord(
            at + timedelta(minutes=number),
            Actor("somebody", f"request-{number}"),
            AuditAction.PUT,
            Namespace(f"n{number % 2}"),
            f"subject-{number}",
        )
        for number in range(count)
    ]


@contextlib.asynccontextmanager
async def logged(database_url, written):
    """Open the audit service and the database, with these records."""
    database = Database(database_url)
    try:
        async with database.writing() as connection:
            await add_audit(connection, written)
        yield AuditService(database=database), database
    finally:
        await database.close()


def numbers(page):
    return [int(entry.subject.removeprefix("subject-")) for entry in page.entries]


@pytest.mark.sql
async def test_pages_follow_each_other_newest_first_without_gap(database_url):
    async with logged(database_url, records(7)) as (service, _):
        first = await service.read(limit=3)
        second = await service.read(limit=3, before=first.next_before)
        third = await service.read(limit=3, before=second.next_before)
        everything = await service.read(limit=7)
        odd = await service.read(limit=2, namespace=Namespace("n1"))

    assert [numbers(page) for page in (first, second, third)] == [[6, 5, 4], [3, 2, 1], [0]]
    assert third.next_before is everything.next_before is None
    assert first.entries[0].at == START + timedelta(minutes=6)
    assert first.entries[0].request_id == "request-6"
    assert numbers(odd) == [5, 3]
    assert odd.next_before is not None


@pytest.mark.sql
async def test_only_old_entries_are_pruned(database_url, monkeypatch):
    monkeypatch.setattr(audit_module, "_PRUNED_AT_ONCE", 2)
    async with logged(database_url, records(8)) as (service, _):
        assert await service.prune(older_than=START + timedelta(minutes=5)) == 5
        assert numbers(await service.read(limit=100)) == [7, 6, 5]


async def test_server_prunes_entries_older_than_its_setting(tmp_path, database_url):
    settings = load_settings(data_dir=tmp_path, database_url=database_url, audit_days=2)
    written = records(3, at=system_clock() - timedelta(days=2, seconds=61))
    async with open_services(settings, blob_store=None, clock=system_clock) as context:
        async with context.database.writing() as connection:
            await add_audit(connection, written)
        await context.maintenance.run_once()
        assert numbers(await context.audit.read(limit=10)) == [2]


def test_actor_name_is_cut_or_unknown(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "x" * 500)
    assert len(Actor.local().name) == MAX_ACTOR_CHARACTERS

    def unknown():
        raise OSError("no user")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert Actor.local().name == "local:unknown"


def test_write_is_logged_with_actor_and_request_id(guarded, connect, namespace):
    token = guarded.token(f"admin:{namespace}", description="job 7")
    job = connect(guarded.url, namespace, token)
    assert job.put(b"x", X_Request_Id="my-request").status_code == 201
    assert job.delete().status_code == 204
    for grant in (f"read:{namespace}", "write:elsewhere"):
        assert guarded.api(namespace, grant).put(b"x").status_code in {403, 404}

    answer = guarded.http(guarded.admin).get("/v1/-/audit", params={"namespace": namespace})

    assert answer.headers["cache-control"] == "no-store"
    deleted, put = answer.json()["entries"]
    assert (put["action"], deleted["action"]) == ("put", "delete")
    assert put["actor"] == deleted["actor"] == f"token:{token.split('_')[1]} job 7"
    assert put["request_id"] == "my-request"
    assert put["address"] == "127.0.0.1"
    assert put["server_request_id"] not in {None, "my-request"}
    assert deleted["request_id"] == deleted["server_request_id"] != put["server_request_id"]
    assert put["subject"] == "/".join(job.key().values())


def test_command_prints_all_pages_of_the_log(guarded, namespace, monkeypatch):
    for _ in range(3):
        guarded.set_policy(namespace, trusted=True)
    monkeypatch.setattr("graphstash_server.commands.audit._PAGE", 2)
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(guarded.server.data_dir))
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", guarded.database_url)
    run = partial(invoke, audit, "--namespace", namespace)

    lines = [json.loads(line) for line in run("--json").splitlines()]
    assert [(each["action"], each["namespace"]) for each in lines] == [
        ("policy_set", namespace)
    ] * 3
    assert len(run("--json", "--limit", "1").splitlines()) == 1
    assert "token:" in run()
    assert "the audit log is empty" in run("--namespace", "untouched")
