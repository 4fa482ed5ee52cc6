"""Publishers send descriptions of artifacts, and the server compares misses with them."""

import asyncio
from contextlib import closing
from datetime import timedelta

import httpx
import pytest
import sqlalchemy as sa

from graphstash_schema.explanation import MAX_PARTS_CHARACTERS, Description
from graphstash_schema.protocol import MAX_DESCRIPTIONS
from graphstash_server.db.tables import descriptions, environments
from graphstash_server.services.artifacts import catalog, explanations
from support.api import OwnKeysApi
from support.services import ACTOR, key_of

pytestmark = pytest.mark.anyio

ENVIRONMENT = {"jax": "0.10.2", "env.XLA_FLAGS": "--a=1"}


@pytest.fixture
def api(api):
    """A namespace with unique keys, because every caller reads all namespaces of this server."""
    with closing(OwnKeysApi(api.url, api.namespace)) as own:
        yield own


def description(api, number=0, *, label="jit(step)", program=None, **environment):
    return {
        "key": api.key(number),
        "label": f"{label} {api.namespace}",
        "program": program or {"program": f"of {api.namespace}", "inputs": "f32[8]"},
        "environment": {**ENVIRONMENT, **environment},
    }


def describe(api, *described):
    return api.call("describe", {"artifacts": list(described)})


def explain(api, described):
    return api.call("explain", described)


def differences(answer):
    return [
        (each["part"], each["here"], each["there"])
        for each in answer.json()["relatives"][0]["differences"]
    ]


@pytest.mark.sql
def test_artifact_with_fewest_differing_parts_is_nearest(api):
    """Parts that an explanation omits, such as the program's digest, still count."""
    for number in range(1, 5):
        api.put(b"executable %d" % number, number)
    describe(
        api,
        description(api, 1, program={"program": "b" * 64, "inputs": "f32[9]"}),
        description(api, 2, label="another name", jax="0.9", **{"env.XLA_FLAGS": "--b"}),
        description(api, 3, label="a third name", jax="0.9"),
        description(api, 4, label="unrelated", program={"program": "c" * 64}),
    )
    relatives = explain(api, description(api, 9)).json()["relatives"]
    assert [each["key"] for each in relatives] == [api.key(3), api.key(2), api.key(1)]

    edited = description(api, 9, program={"program": "d" * 64, "inputs": "f32[8]"})
    relatives = explain(api, edited).json()["relatives"]
    assert [each["key"] for each in relatives] == [api.key(1)]
    api.put(b"executable 5", 5)
    describe(api, description(api, 5))  # the same inputs, another program
    nearest = explain(api, edited).json()["relatives"][0]
    assert nearest["key"] == api.key(5)
    assert [each["part"] for each in nearest["differences"]] == ["program"]


def test_artifact_of_same_script_is_nearer(api):
    for number, script in enumerate(("train.py", "eval.py", "train.py"), start=1):
        api.put(b"executable %d" % number, number)
        program = {"program": "a" * 64, "script": script, "inputs": f"f32[{number}]"}
        describe(api, description(api, number, program=program))
    wanted = {"program": "a" * 64, "script": "eval.py", "inputs": "f32[9]"}
    answer = explain(api, description(api, 9, program=wanted))
    assert answer.json()["relatives"][0]["key"] == api.key(2)
    assert differences(answer) == [("inputs", "f32[9]", "f32[2]")]


async def test_artifact_published_during_the_run_is_not_compared(opened):
    async with opened() as server:
        described = []
        for number in (1, 2, 3):
            assert await server.put(b"blob %d" % number, number)
            one = Description(
                key=key_of(number).key, label="f", program={"inputs": f"f32[{number}]"}
            )
            await server.context.explanations.describe(key_of().namespace, [one])
            described.append(one)
            opened.clock.turn(10)
        where, wanted = [key_of().namespace], described[-1]

        async def compared(min_age):
            answer = await server.context.explanations.explain(
                *where, wanted, readable=where, min_age=timedelta(seconds=min_age)
            )
            return [each.key for each in answer.relatives]

        first, second, _ = (each.key for each in described)
        assert await compared(0) == [second, first]
        assert await compared(25) == [first]
        assert await compared(35) == []


def test_artifact_is_compared_although_its_line_moved(api):
    label = f"train_{api.namespace}.py:{{}}"
    for number, line in enumerate(("7 in main", "120 in main"), start=1):
        api.put(b"executable %d" % number, number)
        described = description(api, number, program={"inputs": f"f32[{number}]"})
        describe(api, described | {"label": label.format(line)})
    wanted = description(api, 9, program={"inputs": "f32[9]"})
    answer = explain(api, wanted | {"label": label.format("8 in main")}).json()
    assert {each["label"] for each in answer["relatives"]} == {
        label.format("7 in main"),
        label.format("120 in main"),
    }
    assert explain(api, wanted | {"label": "other.py:8"}).json()["relatives"] == []


@pytest.mark.sql
def test_artifact_has_its_first_description_until_it_is_deleted_or_withheld(api):
    api.put(b"executable", 1)
    unknown = explain(api, description(api, 2)).json()
    assert (unknown["relatives"], unknown["undescribed"]) == ([], 1)

    describe(api, description(api, 1, jax="0.10.2"), description(api, 5))  # 5 is absent
    describe(api, description(api, 1, jax="forged"))
    answer = explain(api, description(api, 2, jax="0.11.0"))
    assert differences(answer) == [("jax", "0.11.0", "0.10.2")]
    assert len(answer.json()["relatives"]) == 1

    assert api.delete(1).status_code == 204
    assert explain(api, description(api, 2)).json()["relatives"] == []
    api.put(b"executable", 1)
    describe(api, description(api, 1, jax="0.12"))
    assert differences(explain(api, description(api, 2))) == [("jax", "0.10.2", "0.12")]

    api.withhold(b"executable", 1)
    assert explain(api, description(api, 2)).json()["relatives"] == []


def test_caller_without_read_right_gets_no_explanation(guarded, namespace):
    team, other = f"{namespace}-team", f"{namespace}-hidden"
    writers = [guarded.api(where, f"write:{team}", f"write:{other}") for where in (team, other)]
    reader = guarded.api(team, f"read:{team}")
    wanted = description(writers[0], 2, label="x", program={"program": "x"})
    for writer, jax in zip(writers, ("0.9", "0.11"), strict=True):
        assert writer.put(b"executable", 1).status_code == 201
        described = description(writer, 1, label="x", program={"program": "x"}, jax=jax)
        assert describe(writer, described).status_code == 204

    def namespaces(api):
        return {each["namespace"] for each in explain(api, wanted).json()["relatives"]}

    assert namespaces(writers[0]) == {team, other}
    assert namespaces(reader) == {team}
    assert describe(reader, wanted).status_code == 403


def test_only_administrators_get_actor_and_reason_of_a_removal(guarded, namespace):
    writer, owner = (guarded.api(namespace, f"{scope}:{namespace}") for scope in ("write", "admin"))
    assert writer.put(b"executable", 1).status_code == 201
    assert owner.http.delete(owner.path(1)).status_code == 204
    guarded.set_policy(namespace, anonymous_read=True)
    wanted = description(writer, 1, label="x")
    assert explain(owner, wanted).json()["removal"]["actor"].startswith("token:")
    with httpx.Client(base_url=guarded.url) as nobody:
        unnamed = nobody.post(f"/v1/{namespace}/artifacts:explain", json=wanted)
        for answer in (explain(writer, wanted), unnamed):
            removal = answer.json()["removal"]
            assert (removal.pop("at") > "2", removal) == (
                True,
                {"action": "delete", "actor": "", "reason": ""},
            )


async def test_explanation_finds_the_removal_that_the_run_missed(opened):
    """A removal explains the miss of an earlier run, unless the artifact had returned."""
    starts = []
    async with opened() as server:
        key, artifacts = key_of(1), server.context.artifacts
        wanted = Description(key=key.key, program={}, environment={})
        for change in ("put", "delete", "put", "delete", "put"):
            starts.append(opened.clock())
            opened.clock.turn(10)
            if change == "put":
                assert await server.put(b"blob", 1)
            else:
                assert await artifacts.delete(key, actor=ACTOR)
            opened.clock.turn(10)
        starts.append(opened.clock())
        found = []
        for start in starts:
            answer = await server.context.explanations.explain(
                key.namespace, wanted, readable=[key.namespace], min_age=opened.clock() - start
            )
            found.append(answer.removal and answer.removal.at - starts[0])
    first, second = timedelta(seconds=30), timedelta(seconds=70)
    assert found == [None, first, first, second, second, None]


def test_explanation_reports_whether_search_was_complete(api, connect, monkeypatch):
    for namespace in (api.namespace, f"{api.namespace}-other"):
        assert connect(api.url, namespace).put(b"executable", 1).status_code == 201
    for most, is_partial in ((1, True), (10**6, False)):
        monkeypatch.setattr("graphstash_server.api.explanations.MAX_NAMESPACES", most)
        assert explain(api, description(api, 2)).json()["is_partial"] is is_partial


def test_malformed_and_oversized_requests_are_refused(api):
    one = description(api, 1)
    for change in (
        {"environment": {"x": "y" * MAX_PARTS_CHARACTERS}},
        {"program": {"x" * MAX_PARTS_CHARACTERS: "y"}},
        {"environment": {str(number): "" for number in range(300)}},
        {"label": "x" * 129},
        {"label": "two\nlines"},
    ):
        assert describe(api, one | change).status_code == 400
        assert explain(api, one | change).status_code in (400, 413)

    assert describe(api, *[one] * (MAX_DESCRIPTIONS + 1)).status_code == 400
    large = one | {"environment": {"x": "y" * (MAX_PARTS_CHARACTERS - 1)}}
    assert describe(api, *[large] * MAX_DESCRIPTIONS).status_code == 204


@pytest.mark.sql
async def test_equal_environments_are_stored_once_and_removed_when_unused(opened):
    async with opened() as server:
        context = server.context
        described = []
        for number in (1, 2):
            assert await server.put(b"blob", number)
            one = Description(
                key=key_of(number).key, label="f", program={}, environment=ENVIRONMENT
            )
            described.append(one)
        assert await context.explanations.describe(key_of(1).namespace, described) == 2

        async def count(table):
            async with context.database.reading() as connection:
                return await connection.scalar(sa.select(sa.func.count()).select_from(table))

        assert (await count(descriptions), await count(environments)) == (2, 1)
        for number in (1, 2):
            assert await context.artifacts.delete(key_of(number), actor=ACTOR)
        assert await count(descriptions) == 0
        await context.explanations.drop_unused()
        assert await count(environments) == 1  # a publisher may be about to use it
        opened.clock.turn(2 * 24 * 3600)
        await context.explanations.drop_unused()
        assert await count(environments) == 0


async def test_only_one_caller_at_a_time_has_metadata_in_memory(opened, most_at_once):
    """A waiting caller has read nothing yet."""
    searching = most_at_once(catalog, "list_latest")
    explaining = most_at_once(explanations, "list_by_label")
    async with opened() as server:
        context, key = server.context, key_of()
        wanted = Description(key=key.key, label="jit(step)", program={"a": "b"}, environment={})
        where = [key.namespace]
        await asyncio.gather(*(context.catalog.search(where, "step") for _ in range(4)))
        explain = context.explanations.explain
        await asyncio.gather(*(explain(*where, wanted, readable=where) for _ in range(4)))
    assert (searching(), explaining()) == (1, 1)
