"""POST artifacts:lookup: many keys in one call."""

import asyncio
import json
from pathlib import Path

import pytest

from graphstash_schema import Digest, LookupResponse
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.testing import MemoryBlobStore
from support.services import key_of, opener
from support.waiting import until

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

BLOB = b"an executable"


def lookup(api, keys, **keywords):
    body = json.dumps({"keys": keys})
    return api.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=body, **keywords)


def test_found_and_missing_come_back_in_the_order_of_the_question(api):
    for number in (1, 3):
        api.put(BLOB, number)

    answer = lookup(api, [api.key(number) for number in (3, 2, 1, 0)])

    reply = LookupResponse.model_validate_json(answer.content)
    assert [str(found.key.fingerprint) for found in reply.found] == [
        api.fingerprint(3),
        api.fingerprint(1),
    ]
    assert {found.digest for found in reply.found} == {str(Digest.of(BLOB))}
    assert {found.size_bytes for found in reply.found} == {len(BLOB)}
    assert [str(key.fingerprint) for key in reply.missing] == [
        api.fingerprint(2),
        api.fingerprint(0),
    ]


def test_a_key_that_is_asked_twice_is_answered_once(api):
    api.put(BLOB, 1)

    reply = lookup(api, [api.key(1), api.key(1), api.key(2), api.key(2)]).json()

    assert (len(reply["found"]), len(reply["missing"])) == (1, 1)


def test_kind_and_device_type_belong_to_the_key(api):
    api.put(BLOB, 1)

    keys = [{**api.key(1), "kind": "pjrt"}, {**api.key(1), "device_type": "cuda-sm_90"}]

    assert lookup(api, keys).json()["found"] == []


def test_other_namespaces_are_not_looked_at(api, connect):
    api.put(BLOB, 1)

    assert lookup(connect(api.url, f"{api.namespace}-x"), [api.key(1)]).json()["found"] == []


def test_a_thousand_keys_are_answered_quickly(api):
    for number in range(40):
        api.put(b"x", number)
    keys = [api.key(number) for number in range(1000)]
    answer = lookup(api, keys)

    assert len(answer.json()["found"]) == 40
    assert len(answer.json()["missing"]) == 960


def test_more_keys_are_refused_naming_the_limit(api, problem):
    keys = [api.key(number) for number in range(1001)]

    refused = problem(lookup(api, keys), 413, "too_many_keys", "1001", "1000")

    assert refused["limit"] == 1000


def test_no_keys_are_refused(api, problem):
    problem(lookup(api, []), 400, "invalid_request", "keys", "at least 1")


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ({"kind": "wasm"}, "invalid_kind"),
        ({"device_type": "CPU"}, "invalid_device_type"),
        ({"fingerprint": "abc"}, "invalid_fingerprint"),
        ({"colour": "red"}, "invalid_request"),
        ({"fingerprint": 1}, "invalid_request"),
    ],
)
def test_a_key_out_of_form_is_refused_by_its_part(api, problem, key, code):
    problem(lookup(api, [api.key(1), {**api.key(2), **key}]), 400, code, "keys.1.")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"keys": 5}', b"\xff\xfe"])
def test_an_invalid_body_is_refused(api, problem, body):
    answer = api.http.post(f"/v1/{api.namespace}/artifacts:lookup", content=body)

    problem(answer, 400, "invalid_request")


def test_a_body_without_end_is_refused(api, problem):
    answer = api.http.post(
        f"/v1/{api.namespace}/artifacts:lookup", content=b'{"keys": [' + b" " * 3_000_000
    )

    assert problem(answer, 413, "too_large")["limit"] == 512_000


def test_a_lookup_counts_neither_hits_nor_misses(api):
    api.put(BLOB, 1)
    lookup(api, [api.key(1), api.key(2)])
    api.get(1)  # what is counted last is written last
    until(lambda: api.stats()["hits"])

    assert (api.stats()["hits"], api.stats()["misses"]) == (1, 0)


def test_a_whole_artifact_is_verified_and_stays(api):
    api.put(b"x" * 3_000_000, 1)

    answer = api.http.post("/v1/" + api.namespace + "/artifacts:verify", json=api.key(1))

    assert (answer.status_code, answer.json()) == (200, {"found": True, "healed": False})
    assert answer.headers["cache-control"] == "no-store"
    assert api.get(1).status_code == 200


def test_a_damaged_or_lost_artifact_is_verified_and_dropped(api, files):
    before = set(files())
    for number, damage in ((1, lambda path: path.write_bytes(b"y" * 5000)), (2, Path.unlink)):
        api.put(bytes([number]) * 5000, number)
        (path,) = set(files()) - before
        damage(path)

        answer = api.http.post("/v1/" + api.namespace + "/artifacts:verify", json=api.key(number))

        assert answer.json() == {"found": True, "healed": True}
        assert api.get(number).status_code == 404
        assert set(files()) == before


def test_an_absent_artifact_is_verified_as_such(api, problem):
    path = "/v1/" + api.namespace + "/artifacts:verify"

    assert api.http.post(path, json=api.key(9)).json() == {"found": False, "healed": False}
    problem(api.http.post(path, json={"kind": "jax"}), 400, "invalid_request")


async def test_concurrent_verifications_of_one_artifact_read_it_once(tmp_path, monkeypatch):
    """A few bytes of a request would cost gigabytes otherwise."""
    opened = opener(tmp_path, f"sqlite:///{tmp_path / 'database.sqlite3'}")
    keys = [key_of(number) for number in range(4)] * 8
    under_way, most, readings, asked = set(), 0, [], []

    have_all_asked, are_two = asyncio.Event(), asyncio.Event()
    is_whole, ask = MemoryBlobStore.is_whole, ArtifactService._is_whole

    async def read(blobs, digest):
        nonlocal most
        readings.append(digest)
        under_way.add(digest)
        most = max(most, len(under_way))
        if most > 1:
            are_two.set()
        await have_all_asked.wait()
        await are_two.wait()
        under_way.remove(digest)
        return await is_whole(blobs, digest)

    async def counted(artifacts, digest):
        asked.append(digest)
        if len(asked) == len(keys):
            have_all_asked.set()
        return await ask(artifacts, digest)

    monkeypatch.setattr(MemoryBlobStore, "is_whole", read)
    monkeypatch.setattr(ArtifactService, "_is_whole", counted)
    async with opened() as verbs:
        for number in range(4):
            await verbs.put(b"blob %d" % number, number)
        verify = verbs.context.artifacts.verify
        replies = await asyncio.gather(*map(verify, keys))
        assert all(reply.found and not reply.healed for reply in replies)
        assert (len(readings), most) == (4, 2)
        assert (await verify(keys[0])).found
        assert len(readings) == 5, "who asks later has it read again"
