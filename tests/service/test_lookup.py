"""POST artifacts:lookup finds many keys in one call, and artifacts:verify checks one blob."""

import asyncio
from pathlib import Path

import pytest

from graphstash_schema import Digest, ErrorCode, LookupResponse
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.testing import MemoryBlobStore
from support.services import key_of
from support.waiting import until

pytestmark = pytest.mark.anyio

BLOB = b"an executable"


def lookup(api, keys):
    return api.call("lookup", {"keys": keys})


@pytest.mark.sql
def test_each_key_is_found_missing_or_withdrawn_once_in_request_order(api, connect):
    for number in (1, 3, 4):
        api.put(BLOB, number)
    api.withhold(BLOB, 4)
    others = [api.key(1) | {"kind": "pjrt"}, api.key(1) | {"device_type": "cuda-sm_90"}]

    answer = lookup(api, [*(api.key(number) for number in (3, 2, 4, 1, 0, 2, 3)), *others])

    reply = answer.json()
    LookupResponse.model_validate(reply)
    found, withdrawn = reply["found"], reply["withdrawn"]
    assert [each["key"] for each in found] == [api.key(3), api.key(1)]
    assert [each["key"] for each in withdrawn] == [api.key(4)]
    assert {each["digest"] for each in found + withdrawn} == {str(Digest.of(BLOB))}
    assert {each["size_bytes"] for each in found} == {len(BLOB)}
    assert reply["missing"] == [api.key(2), api.key(4), api.key(0), *others]
    assert lookup(connect(api.url, f"{api.namespace}-x"), [api.key(1)]).json()["found"] == []


@pytest.mark.sql
def test_lookup_accepts_a_thousand_keys_and_refuses_more(api, problem):
    for number in range(40):
        api.put(b"x", number)
    keys = [api.key(number) for number in range(1001)]
    answer = lookup(api, keys[:1000]).json()
    assert (len(answer["found"]), len(answer["missing"])) == (40, 960)
    api.get(0)  # the last counted hit is the last written one
    until(lambda: api.stats()["hits"])
    assert (api.stats()["hits"], api.stats()["misses"]) == (1, 0)  # look-ups do not count

    refused = problem(lookup(api, keys), 413, "too_many_keys", "1001", "1000")
    assert refused["limit"] == 1000


def test_malformed_key_is_refused_naming_its_part(api, problem):
    for part, code in (
        ({"kind": "wasm"}, "invalid_kind"),
        ({"device_type": "CPU"}, "invalid_device_type"),
        ({"fingerprint": "abc"}, "invalid_fingerprint"),
        ({"colour": "red"}, "invalid_request"),
    ):
        problem(lookup(api, [api.key(1), api.key(2) | part]), 400, code, "keys.1.")
    problem(lookup(api, []), 400, "invalid_request", "keys", "at least 1")


def test_verification_drops_only_damaged_or_lost_artifacts(api, file_of, problem):
    api.put(b"x" * 3_000_000, 1)
    answer = api.call("verify", api.key(1))
    assert (answer.status_code, answer.json()) == (200, {"found": True, "healed": False})
    assert answer.headers["cache-control"] == "no-store"
    assert api.get(1).status_code == 200

    for number, damage in ((2, lambda path: path.write_bytes(b"y" * 5000)), (3, Path.unlink)):
        blob = f"{api.namespace} {number}".encode().ljust(5000)
        api.put(blob, number)
        path = file_of(blob)
        damage(path)

        answer = api.call("verify", api.key(number))

        assert answer.json() == {"found": True, "healed": True}
        assert api.get(number).status_code == 404
        assert not path.exists()
    assert api.call("verify", api.key(9)).json() == {"found": False, "healed": False}
    problem(api.call("verify", {"kind": "jax"}), 400, "invalid_request")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_concurrent_verifications_of_one_artifact_read_it_once(opened, monkeypatch):
    """Otherwise a small request would cost gigabytes of reads."""
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
        assert len(readings) == 5, "a later call reads the blob again"


async def test_interrupted_read_drops_no_artifact(opened):
    async with opened() as client:
        await client.put(BLOB)
        open_whole = opened.blobs.open

        async def cut(digest):
            reader = await open_whole(digest)

            async def chunks(start, stop):
                yield b"some"
                raise ShortBlobError("the connection broke")

            reader.chunks = chunks
            return reader

        opened.blobs.open = cut
        with pytest.raises(ServerError) as refused:
            await client.context.artifacts.verify(key_of())
        assert refused.value.code is ErrorCode.UNAVAILABLE
        opened.blobs.open = open_whole
        assert await client.get() == BLOB
