"""Policies of namespaces: accepted and refused requests, and when a server applies a change."""

import asyncio
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from graphstash_schema import Digest, ErrorCode, Namespace, NamespacePolicy, WriteMode
from graphstash_server.commands.namespace import namespace as namespace_command
from graphstash_server.db.tables import namespaces
from graphstash_server.errors import ServerError
from graphstash_server.services.buckets import Buckets
from graphstash_server.services.namespaces import PolicyService, Rates
from graphstash_server.testing import LiveServer
from support.services import ACTOR, FakeClock
from support.wire import Wire, put_head

pytestmark = pytest.mark.anyio

TEAM = Namespace("team")
READ_ONLY = NamespacePolicy(mode=WriteMode.READ_ONLY)


def policy_path(api):
    return f"/v1/-/namespaces/{api.namespace}"


def give(api, **rules):
    answer = api.http.put(policy_path(api), json=rules)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.sql
def test_policy_is_stored_shown_listed_removed_and_logged(api, problem):
    problem(api.http.get(policy_path(api)), 404, "not_found", api.namespace)
    for rules, named in (
        ({"mode": "sometimes"}, "mode"),
        ({"limit_bytes": 0}, "limit_bytes"),
        ({"requests_per_second": 1e-310}, "requests_per_second"),  # its pause is infinite
        ({"moda": "read_only"}, "moda"),
    ):
        problem(api.http.put(policy_path(api), json=rules), 400, "invalid_request", named)
    problem(api.http.get(policy_path(api)), 404, "not_found")

    given = give(api, mode="overwrite", trusted=True, limit_bytes=1000, requests_per_second=900)
    assert api.http.get(policy_path(api)).json() == given
    assert given["policy"] == {
        "mode": "overwrite",
        "trusted": True,
        "anonymous_read": False,
        "limit_bytes": 1000,
        "max_artifact_bytes": None,
        "requests_per_second": 900,
    }
    assert given in api.http.get("/v1/-/namespaces").json()["namespaces"]

    give(api, mode="read_only")
    assert api.http.get(policy_path(api)).json()["policy"]["trusted"] is False
    assert api.http.delete(policy_path(api)).status_code == 204
    problem(api.http.delete(policy_path(api)), 404, "not_found", api.namespace)
    entries = api.http.get("/v1/-/audit", params={"namespace": api.namespace}).json()["entries"]
    assert [(each["action"], each["subject"], each["detail"]) for each in entries[:2]] == [
        ("policy_remove", api.namespace, ""),
        ("policy_set", api.namespace, '{"mode":"read_only"}'),
    ]
    assert api.put(b"as before").status_code == 201


def test_read_only_namespace_serves_artifacts_and_refuses_writes(api, problem, files):
    api.put(b"there", 1)
    give(api, mode="read_only")
    before = (files(), api.stats())

    refused = problem(api.put(b"new", 2), 403, "read_only", api.namespace, "--mode write_once")
    assert refused["retryable"] is False
    for blob in (b"there", b"other"):
        problem(api.put(blob, 1), 403, "read_only")
    manifest = f"/v1/{api.namespace}/manifests/job"
    problem(api.http.put(manifest, json={"keys": [api.key(1)]}), 403, "read_only")
    problem(api.acquire(2, wait=1), 403, "read_only")  # no caller should wait for this compile
    status, refused = announce(api, 300_000_000)  # before the server reads the body
    assert (status, refused["code"]) == (403, "read_only")

    assert (files(), api.stats()) == before
    assert api.get(1).content == b"there"
    assert api.http.get(manifest).status_code == 404


def announce(api, size_bytes):
    """Return the answer to the headers of an upload whose body never arrives."""
    announced = Digest("0" * 64, size_bytes)
    with Wire(api.url) as wire:
        answer = wire.ask(put_head(api.path(), announced, "Expect: 100-continue"))
        assert wire.is_closed
    return answer.status, answer.problem


def test_smaller_limit_of_policy_and_settings_applies_to_artifacts(api, problem, files):
    give(api, max_artifact_bytes=1000)
    before = files()

    refused = problem(api.put(b"x" * 1001), 413, "too_large", "1001", "1000", "--max-artifact")
    assert refused["limit"] == 1000
    assert files() == before
    assert api.put(b"x" * 1000).status_code == 201

    give(api, max_artifact_bytes=10**12)
    status, refused = announce(api, 500 * 1024**2)
    assert (status, refused["limit"]) == (413, 400 * 1024**2)
    assert "GRAPHSTASH_MAX_ARTIFACT_BYTES" in refused["detail"]


def test_limit_of_a_policy_overrides_the_servers_settings(tmp_path, connect):
    limits = {"te*": 10_000}
    with LiveServer(tmp_path, log_level="error", namespace_limits=limits) as server:
        api = connect(server.url)
        assert api.put(b"x" * 15_000, 1).status_code == 507
        give(api, limit_bytes=20_000)
        assert api.put(b"x" * 15_000, 1).status_code == 201


def test_requests_over_the_rate_get_a_retry_after(api, connect, problem):
    other = connect(api.url, f"{api.namespace}-other")
    api.put(b"x", 1)
    give(api, requests_per_second=0.001)

    assert api.get(1).status_code == 200
    answer = api.get(1)

    refused = problem(answer, 429, "rate_limited", api.namespace, "--requests-per-second")
    assert refused["retryable"] is True
    assert refused["limit"] == 0.001
    assert 900 < int(answer.headers["retry-after"]) <= 1000
    assert other.get(1).status_code == 404


def test_region_reads_withdrawals_over_the_rate(guarded, namespace, connect):
    regional, writer = (
        connect(guarded.url, namespace, guarded.token(grant))
        for grant in ("read:*", f"write:{namespace}")
    )
    give(connect(guarded.url, namespace, guarded.token("admin:*")), requests_per_second=0.001)
    path = f"/v1/{namespace}/withdrawals"
    assert [writer.http.get(path).status_code for _ in range(2)] == [200, 429]
    assert [regional.http.get(path).status_code for _ in range(2)] == [200, 200]
    assert regional.get(1).status_code == 429


def test_bucket_holds_the_requests_of_one_second_and_refills():
    clock = FakeClock()
    buckets = Buckets(seconds=clock.steady)
    rates = Rates(buckets)

    def is_in(namespace=TEAM, per_second=10):
        try:
            rates.take(namespace, per_second=per_second)
        except ServerError as error:
            return error.code, error.retry_after_seconds
        return True

    def late(seconds):
        return ErrorCode.RATE_LIMITED, pytest.approx(seconds)

    assert [is_in() for _ in range(10)] == [True] * 10
    assert is_in() == late(0.1)
    assert is_in(Namespace("other")) is True
    clock.turn(0.25)
    assert [is_in(), is_in()] == [True, True]
    assert is_in() == late(0.05)
    clock.turn(3600)
    assert [is_in() for _ in range(10)] == [True] * 10
    assert is_in() == late(0.1)

    slow = Namespace("slow")
    assert is_in(slow, per_second=0.5) is True
    assert is_in(slow, per_second=0.5) == late(2)
    clock.turn(2)
    assert is_in(slow, per_second=0.5) is True

    for number in range(4200):
        rates.take(Namespace(f"n{number}"), per_second=1)
        clock.turn(0.01)
        assert is_in(slow, per_second=0.001) is not True  # a bucket in use is not dropped
    assert len(buckets) == 4096


@pytest.mark.sql
async def test_another_server_applies_change_after_two_seconds(opened):
    async with opened() as one, opened() as two:
        here, there = one.context.policies, policies_of(two, opened.clock)
        assert await there.of(TEAM) == NamespacePolicy()

        await here.put(TEAM, READ_ONLY, ACTOR)
        assert await here.of(TEAM) == READ_ONLY
        assert await there.of(TEAM) == NamespacePolicy()
        opened.clock.turn(2)
        assert await there.of(TEAM) == READ_ONLY

        opened.clock.jump(-3600)  # only the rows themselves record changes
        await here.put(TEAM, NamespacePolicy(anonymous_read=True), ACTOR)
        opened.clock.turn(2)
        assert (await there.of(TEAM)).anonymous_read

        async with one.context.database.writing() as connection:  # like a later release
            await connection.execute(sa.update(namespaces).values(mode="append_only"))
        opened.clock.turn(2)
        assert (await there.of(TEAM)).mode is WriteMode.READ_ONLY


@pytest.mark.filterwarnings("ignore:.*fork")  # of JAX, and of Python 3.12
def test_worker_frozen_inside_a_bucket_does_not_block_other_workers():
    context = multiprocessing.get_context("fork")
    is_inside, hold = context.Event(), context.Event()
    first_in_child = [True]

    def seconds():
        if multiprocessing.parent_process() is not None and first_in_child:
            first_in_child.clear()
            is_inside.set()
            hold.wait()
        return 0.0

    buckets = Buckets(seconds=seconds)
    worker = context.Process(
        target=buckets.take, args=("team", 1), kwargs={"most": 1, "per_second": 1}
    )
    worker.start()
    assert is_inside.wait(60)
    assert buckets.take("team", 3, most=1, per_second=1)[0] == 3
    worker.kill()
    worker.join()
    assert [buckets.take("team", 3, most=1, per_second=1)[0] for _ in range(2)] == [1, 0]


def policies_of(server, clock, database=None):
    database = database or server.context.database
    return PolicyService(
        database=database, clock=clock, rates=Rates(Buckets()), seconds=clock.steady
    )


class Counted:
    """A database that counts its queries, and can be slow or broken."""

    def __init__(self, database):
        self.asked = 0
        self.is_broken = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._database = database

    async def fetch(self, statement, given):
        await self.may_answer.wait()
        self.asked += 1
        if self.is_broken:
            raise ServerError(ErrorCode.UNAVAILABLE, "the database does not answer")
        return await self._database.fetch(statement, given)


async def test_cached_policy_holds_for_one_minute_without_database(opened):
    async with opened() as server:
        await server.context.policies.put(TEAM, READ_ONLY, ACTOR)
        database = Counted(server.context.database)
        policies = policies_of(server, opened.clock, database)
        await asyncio.gather(*(policies.of(Namespace(f"n{each}")) for each in range(100)))
        assert database.asked == 2  # for the policies and for the mark of changes
        database.is_broken = True

        opened.clock.turn(59)
        assert await policies.of(TEAM) == READ_ONLY
        assert await policies.of(TEAM) == READ_ONLY
        assert database.asked == 3  # one query for a failing database, not one per request
        opened.clock.turn(2)
        with pytest.raises(ServerError) as refused:
            await policies.of(TEAM)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        database.is_broken = False
        assert await policies.of(TEAM) == READ_ONLY


async def test_requests_share_one_query_to_a_database_that_never_answered(opened):
    async with opened() as server:
        database = Counted(server.context.database)
        policies = policies_of(server, opened.clock, database)
        database.is_broken = True
        database.may_answer.clear()
        asking = [asyncio.create_task(policies.of(TEAM)) for _ in range(100)]
        await asyncio.sleep(0)
        database.may_answer.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)

        assert {answer.code for answer in answers} == {ErrorCode.UNAVAILABLE}
        assert database.asked == 1
        database.is_broken = False
        assert await policies.of(TEAM) == NamespacePolicy()


@pytest.mark.sql
async def test_concurrent_changes_of_one_policy_are_all_kept(opened):
    changes = {
        "mode": WriteMode.READ_ONLY,
        "trusted": True,
        "anonymous_read": True,
        "limit_bytes": 1000,
        "max_artifact_bytes": 10,
        "requests_per_second": 5.0,
    }
    async with opened() as one, opened() as other:
        await asyncio.gather(
            *(
                server.context.policies.change(TEAM, {field: value}, ACTOR)
                for server, (field, value) in zip((one, other) * 3, changes.items(), strict=True)
            )
        )
        found = await one.context.policies.find(TEAM)
    assert found.policy == NamespacePolicy(**changes)


@pytest.mark.sql
def test_policies_of_many_namespaces_can_be_set_at_once(api):
    def put(number):
        path = f"/v1/-/namespaces/{api.namespace}-{number % 3}"
        return api.http.put(path, json={"limit_bytes": number + 1}).status_code

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(put, range(12))) == [200] * 12


@pytest.fixture
def command(command_on):
    return command_on(namespace_command)


def test_command_changes_only_named_fields_and_is_logged(command, connect):
    command("set", "team", "--mode", "read_only", "--limit", "10GiB", "--trusted")
    changed = command("set", "team", "--max-artifact", "1MiB", "--limit", "none", "--json")
    assert json.loads(changed)[0]["policy"]["max_artifact_bytes"] == 1024**2

    (shown,) = json.loads(command("show", "team", "--json"))
    assert shown["policy"] == {
        "mode": "read_only",
        "trusted": True,
        "anonymous_read": False,
        "limit_bytes": None,
        "max_artifact_bytes": 1024**2,
        "requests_per_second": None,
    }
    assert command("list") == "team: read_only, trusted, artifacts of at most 1.0 MiB\n"
    entry = connect(command.url).http.get("/v1/-/audit").json()["entries"][0]
    assert entry["action"] == "policy_set"
    assert entry["actor"].startswith("local:")
    assert entry["request_id"] is None

    assert "the defaults apply" in command("remove", "team")
    command("set", "team", "--requests-per-second", "100", "--anonymous-read")
    result = json.loads(command("remove", "team", "--json"))
    assert result == {"namespace": "team", "removed": True}
    for words, status, said in (
        (("remove", "team"), 1, "no policy"),
        (("show", "team"), 1, "no policy"),
        (("set", "team"), 2, "give at least one option"),
        (("set", "team", "--limit", "much"), 2, "is not a size"),
        (("set", "team", "--requests-per-second", "-1"), 2, "requests_per_second=-1"),
    ):
        assert said in command(*words, status=status)
    assert "no namespace has a policy" in command("list")
    assert json.loads(command("list", "--json")) == []
