"""Lists of a namespace's artifacts, one page at a time."""

import asyncio
import sys
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from graphstash_schema import ArtifactMetadata, Digest, Namespace
from graphstash_schema.explanation import Description
from graphstash_schema.listing import MAX_DETAILED_ARTIFACTS, ArtifactQuery
from graphstash_server.services.artifacts import listing
from graphstash_server.testing import as_chunks
from support.api import OwnKeysApi, digest_header
from support.services import key_of, upload_of
from support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def api(api):
    """A namespace with unique keys, because every caller reads all namespaces of this server."""
    with closing(OwnKeysApi(api.url, api.namespace)) as own:
        yield own


def page(api, **query):
    answer = api.http.get(f"/v1/{api.namespace}/artifacts", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pages(api, **query):
    """Yield every page."""
    found = page(api, **query)
    yield found["artifacts"]
    while found["next"] is not None:
        found = page(api, after=found["next"], **query)
        yield found["artifacts"]


def fingerprints(artifacts):
    return [each["key"]["fingerprint"] for each in artifacts]


def test_artifact_is_listed_with_all_its_details(api):
    metadata = ArtifactMetadata(
        compile_seconds=4.5, raw_size_bytes=9, producer="ana@host:1", parts={"jax": "0.10"}
    )
    api.put(b"executable", 1, Graphstash_Metadata=metadata.to_header())
    described = {
        "key": api.key(1),
        "label": "jit(step)",
        "program": {"program": "text"},
        "environment": {"jax": "0.10"},
    }
    assert api.call("describe", {"artifacts": [described]}).status_code == 204
    api.get(1)
    until(lambda: page(api)["artifacts"][0]["hits"] == 1)

    (listed,) = page(api)["artifacts"]
    assert listed["key"] == api.key(1)
    assert listed["digest"] == str(Digest.of(b"executable"))
    assert (listed["size_bytes"], listed["label"]) == (10, "jit(step)")
    assert listed["metadata"]["producer"] == "ana@host:1"
    assert (listed["metadata"]["parts"], listed["description"]) == ({}, None)

    (whole,) = page(api, details=True)["artifacts"]
    assert whole["metadata"]["parts"] == {"jax": "0.10"}
    assert whole["description"] == described

    for number in range(2, MAX_DETAILED_ARTIFACTS + 2):
        api.put(b"executable %d" % number, number)
    sizes = [len(each) for each in pages(api, details=True, limit=500)]
    assert sizes == [MAX_DETAILED_ARTIFACTS, 1]  # pages with details are shorter


@pytest.mark.sql
@pytest.mark.parametrize("order", ["fingerprint", "newest", "size"])
def test_pages_list_every_artifact_once_unless_it_is_withheld(api, order):
    for number in range(0, 16, 2):
        api.put(b"executable %02d" % number, number)
    api.withhold(b"executable 14", 14)
    wanted = [api.fingerprint(number) for number in range(0, 14, 2)]
    if order != "fingerprint":
        wanted.reverse()  # all have the same size
    found = [fingerprints(each) for each in pages(api, limit=3, order=order)]
    assert found == [wanted[:3], wanted[3:6], wanted[6:]]

    first = page(api, limit=3, order=order)
    api.put(b"later", 1)  # moves no artifact across the pages' border
    second = page(api, limit=3, order=order, after=first["next"])
    assert fingerprints(second["artifacts"]) == wanted[3:6]


@pytest.mark.sql
def test_largest_artifacts_come_first(api):
    for number, size_bytes in enumerate((10, 5000, 300, 5000, 0)):
        api.put(b"." * size_bytes, number)
    found = [each["size_bytes"] for found in pages(api, order="size", limit=2) for each in found]
    assert found == [5000, 5000, 300, 10, 0]


@pytest.mark.sql
def test_list_is_filtered_by_kind_device_type_fingerprint_and_label(api):
    api.put(b"executable 1", 1)
    api.put(b"executable 2", 2)
    other = api.path(1).replace("/jax/cpu-x86_64-0123456789abcdef/", "/triton/cuda-sm_90/")
    kernel = api.http.put(other, content=b"kernel", headers=digest_header(b"kernel"))
    assert kernel.status_code == 201
    labels = {1: "jit(train_step)", 2: "jit(100%_step)"}
    described = [
        {"key": api.key(number), "label": label, "program": {}, "environment": {}}
        for number, label in labels.items()
    ]
    api.call("describe", {"artifacts": described})

    def chosen(**query):
        return [
            (each["key"]["kind"], each["key"]["fingerprint"])
            for found in pages(api, **query)
            for each in found
        ]

    assert chosen(kind="triton") == [("triton", api.fingerprint(1))]
    assert chosen(device_type="cuda-sm_90") == [("triton", api.fingerprint(1))]
    assert chosen(fingerprint=api.fingerprint(2)) == [("jax", api.fingerprint(2))]
    assert len(chosen(fingerprint=api.fingerprint(1)[:-40])) == 2
    assert chosen(label="TRAIN") == [("jax", api.fingerprint(1))]
    assert chosen(label="100%_") == [("jax", api.fingerprint(2))]
    assert chosen(label="1__") == []
    assert chosen(kind="jax", label="step", order="newest") == [
        ("jax", api.fingerprint(2)),
        ("jax", api.fingerprint(1)),
    ]


def test_malformed_query_parameter_is_named(api, problem):
    last = f"{'0' * 64}/jax/cpu"
    for query, named in (
        ({"order": "size", "after": f"2026-01-01T00:00:00+00:00/{last}"}, "next"),
        ({"order": "size", "after": f"-1/{last}"}, "next"),
        ({"order": "size", "after": f"{10**19}/{last}"}, "next"),
        ({"order": "newest", "after": f"10/{last}"}, "next"),
        ({"colour": "red"}, "colour"),
        ({"after": "x"}, "after='x'"),
        ({"after": f"2026-01-01T00:00:00/{last}"}, "next"),
        ({"after": f"2026-01-01T00:00:00+00:00/{last.replace('jax', 'j x')}"}, "next"),
        ({"order": "newest", "after": f"0001-01-01T00:00:00+14:00/{last}"}, "next"),
        ({"order": "newest", "after": f"9999-12-31T23:59:59-14:00/{last}"}, "next"),
    ):
        answer = api.http.get(f"/v1/{api.namespace}/artifacts", params=query)
        problem(answer, 400, "invalid_request", named)


@pytest.mark.parametrize("order", ["fingerprint", "newest", "size"])
async def test_rare_artifact_is_found_after_several_bounded_calls(opened, monkeypatch, order):
    """A page may be empty although further pages are not. All artifacts have the same time."""
    monkeypatch.setattr(listing, "_SCANNED", 3)
    async with opened() as client:
        for number in range(8):
            await client.put(b"executable %d" % number, number)
        keys = sorted((key_of(number) for number in range(8)), key=lambda key: key.fingerprint)
        rare = keys[-1 if order == "fingerprint" else 0]
        described = Description(key=rare.key, label="jit(rare)", program={}, environment={})
        await client.context.explanations.describe(rare.namespace, [described])
        found, after = [], ""
        while after is not None:
            query = ArtifactQuery(order=order, label="rare", after=after)
            answer = await client.context.listing.list_artifacts(rare.namespace, query)
            found.append([each.key.fingerprint for each in answer.artifacts])
            after = answer.next
        assert found == [[], [], [rare.fingerprint]]


@contextmanager
def counted_turns():
    """Count the function calls in each turn of this thread's event loop, in order."""
    turns = [0]

    def count(frame, event, _):
        if event in ("call", "c_call"):
            turns[-1] += 1
            if event == "call" and frame.f_code is asyncio.Handle._run.__code__:
                turns.append(0)

    sys.setprofile(count)
    try:
        yield turns
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_long_page_yields_to_the_event_loop(opened):
    """In one turn, the page took 27,000 function calls."""
    async with opened() as server:
        parts = {f"part {number}": "x" * 200 for number in range(12)}
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=1, parts=parts)
        uploads = (
            replace(upload_of(key_of(number), b"blob"), metadata_header=metadata.to_header())
            for number in range(500)
        )
        publish = server.context.uploads.publish
        await asyncio.gather(*(publish(upload, as_chunks(b"blob")) for upload in uploads))
        query = ArtifactQuery(limit=500)
        with counted_turns() as turns:
            page = await server.context.listing.list_artifacts(Namespace("team"), query)
        assert len(page.artifacts) == 500
        assert sum(turns) > 25_000
        assert max(turns) < 5_000
