"""Manifests: the artifacts that a job used, merged over its runs."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from graphstash_schema import Manifest, ManifestName, Namespace
from graphstash_server.db.queries.usage import recount_usage
from graphstash_server.services.jobs import manifests
from support.services import ACTOR, key_of

pytestmark = pytest.mark.anyio


def path(api, name="train_gpt"):
    return f"/v1/{api.namespace}/manifests/{name}"


def put(api, numbers, name="train_gpt"):
    body = json.dumps({"keys": [api.key(number) for number in numbers]})
    return api.http.put(path(api, name), content=body)


def entries(answer):
    manifest = Manifest.model_validate_json(answer.content)
    return {str(entry.key.fingerprint): entry.runs for entry in manifest.entries}


def test_first_run_creates_manifest_and_later_runs_are_merged_in_front(api, connect, problem):
    problem(api.http.get(path(api)), 404, "not_found", "train_gpt")

    answer = put(api, [1, 2])
    assert answer.status_code == 201
    assert entries(answer) == {api.fingerprint(1): 1, api.fingerprint(2): 1}
    assert answer.json()["name"] == "train_gpt"
    assert entries(api.http.get(path(api))) == entries(answer)
    assert api.http.get(path(connect(api.url, f"{api.namespace}-x"))).status_code == 404

    answer = put(api, [2, 3, 3])
    assert answer.status_code == 200
    runs = {1: 1, 2: 2, 3: 1}
    assert entries(answer) == {api.fingerprint(number): runs[number] for number in runs}
    first, *_, last = answer.json()["entries"]
    assert first["key"]["fingerprint"] == api.fingerprint(2)
    assert last["key"]["fingerprint"] == api.fingerprint(1)
    used_at = datetime.fromisoformat(first["used_at"])
    assert abs(datetime.now(UTC) - used_at) < timedelta(minutes=1)


@pytest.mark.sql
def test_concurrent_runs_are_all_merged(api, connect):
    jobs = [connect(api.url, api.namespace) for _ in range(8)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n, job: put(job, [0, n + 1]).status_code, range(8), jobs))

    assert sorted(answers) == [200] * 7 + [201]
    merged = entries(api.http.get(path(api)))
    assert merged[api.fingerprint(0)] == 8
    assert len(merged) == 9


def test_least_recently_used_entries_are_dropped_first(api):
    put(api, range(10))

    answer = put(api, range(10, 10 + 4092))

    kept = entries(answer)
    assert len(kept) == 4096
    assert sum(api.fingerprint(number) in kept for number in range(10)) == 4


def test_empty_and_oversized_manifests_are_refused(api, problem):
    answer = put(api, range(4097))

    assert problem(answer, 413, "too_many_keys", "4097", "4096")["limit"] == 4096
    problem(put(api, []), 400, "invalid_request", "keys", "at least 1")
    assert api.http.get(path(api)).status_code == 404


@pytest.mark.parametrize("name", ["-x", "x" * 129, "%20", "a%0ab", ".hidden"])
def test_malformed_name_is_refused(api, problem, name):
    problem(put(api, [1], name), 400, "invalid_name", "job name")
    problem(api.http.get(path(api, name)), 400, "invalid_name")


@pytest.mark.sql
async def test_entries_of_a_namespace_are_bounded_counted_and_dropped_when_unused(
    opened, monkeypatch
):
    """Above the limit, the server drops the entries that were unused for longest, of any job."""
    monkeypatch.setattr(manifests, "_MAX_ENTRIES", 10)
    team = Namespace("team")
    jobs = [ManifestName(f"job-{number}") for number in range(4)]
    async with opened() as server:
        merge = functools.partial(server.context.manifests.merge, team, writer="", actor=ACTOR)
        for number, job in enumerate(jobs):
            await merge(job, [key_of(10 * number + each) for each in range(4)])
            opened.clock.turn(60)
        await merge(jobs[1], [key_of(10)])

        kept = [len(await server.context.manifests.get(team, job)) for job in jobs]
        assert kept == [0, 2, 4, 4]
        assert (await server.used()).manifest_bytes == 10 * 512
        async with server.context.database.reading() as connection:
            assert await recount_usage(connection) == {}

        opened.clock.turn(91 * 24 * 3600)
        await server.context.manifests.drop_unused()
        assert (await server.used()).manifest_bytes == 0
        assert await server.context.manifests.get(team, jobs[1]) == []
        entries, is_new = await merge(jobs[1], [key_of(1)])
        assert is_new
        assert [entry.fingerprint for entry in entries] == [key_of(1).fingerprint]
