"""A region downloads an artifact once, checks it, and serves it without its upstream."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from graphstash_schema import Digest
from support.regions import envelope, read
from support.waiting import until


def variables_of(database, request):
    if database == "sqlite":
        return {}
    return {"GRAPHSTASH_DATABASE_URL": request.getfixturevalue("postgres").new_database()}


def downloads(link):
    return link.to("/artifacts/", method="GET")


@pytest.mark.parametrize(("database", "workers"), [("sqlite", 2), ("postgresql", 2)])
def test_artifact_crosses_each_link_once_for_many_concurrent_clients(
    world, request, database, workers
):
    center = world.api(world.center)
    blob = envelope(center, 1, b"x" * 300_000)
    assert center.put(blob, 1, seconds=2).status_code == 201
    links = [world.link(), world.link()]
    regions = [
        world.region(
            *("--workers", str(workers)), upstream=link.url, **variables_of(database, request)
        )
        for link in links
    ]
    clients = [world.api(region) for region in regions for _ in range(8)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda client: read(client, 1), clients))
    assert [answer.status_code for answer in answers] == [200] * 16
    assert {answer.content for answer in answers} == {blob}
    metadata = center.head(1).headers["graphstash-metadata"]
    assert {answer.headers["graphstash-metadata"] for answer in answers} == {metadata}
    assert [len(downloads(link)) for link in links] == [1, 1]
    events = [region.events(world.admin) for region in regions]
    assert [each["fetch_stored"] for each in events] == [1, 1]


def test_head_lookup_and_range_find_the_artifacts_of_the_upstream(world):
    center, region = world.api(world.center), world.api(world.region())
    blobs = {number: envelope(center, number, b"%d" % number) for number in (1, 2)}
    for number, blob in blobs.items():
        assert center.put(blob, number).status_code == 201
    assert region.head(1).headers["etag"] == Digest.of(blobs[1]).etag
    found = region.call("lookup", {"keys": [region.key(2), region.key(3)]}).json()
    assert [each["digest"] for each in found["found"]] == [str(Digest.of(blobs[2]))]
    assert found["missing"] == [region.key(3)]
    part = read(region, 2, range="bytes=0-6")
    assert (part.status_code, part.content) == (206, blobs[2][:7])
    assert read(region, 3).status_code == 404


def test_region_without_upstream_serves_what_it_has(world):
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    blob = envelope(center, 1)
    assert center.put(blob, 1).status_code == 201
    assert read(region, 1).content == blob
    world.center.kill()
    assert read(region, 1).content == blob
    assert read(region, 2).status_code == 404
    site.kill()
    site.start()
    assert read(region, 1).content == blob
    assert site.events(world.admin)["up"] == 0


def flipped(answer):
    body = bytearray(answer.body)
    body[-1] ^= 1
    return replace(answer, body=bytes(body))


def of_other_digest(answer):
    wrong = {"repr-digest": Digest.of(b"other").repr_digest}
    return replace(answer, headers=answer.headers | wrong)


def shortened(answer):
    sent = {"content-length": str(len(answer.body))}
    return replace(answer, headers=answer.headers | sent, body=answer.body[:-9])


def of_other_size(answer):
    return replace(answer, body=answer.body + b"more")


def test_wrong_bytes_of_the_upstream_are_a_counted_miss(world):
    center, link = world.api(world.center), world.link()
    site = world.region(upstream=link.url)
    region = world.api(site)
    for number, lie in enumerate((flipped, of_other_digest, of_other_size, shortened)):
        assert center.put(envelope(center, number, b"x" * 10_000), number).status_code == 201
        link.change = lambda request, answer, lie=lie: (
            lie(answer) if request.method == "GET" and "/artifacts/" in request.path else answer
        )
        assert read(region, number).status_code == 404, lie
        events = site.events(world.admin)
        assert events["fetch_refused"] == min(number + 1, 3), lie
        assert events.get("fetch_failed", 0) == (lie is shortened)
    assert region.stats() == {} or region.stats()["artifacts"] == 0


def test_artifact_of_another_key_is_refused(world):
    """The upstream's look-up also returns the wrong artifact. Only the envelope names the key."""

    def change(request, answer):
        if request.method == "GET" and "/artifacts/" in request.path:
            return box.ask(request, path=center.path(2))
        if "artifacts:lookup" in request.path and center.fingerprint(1).encode() in request.body:
            swapped = request.body.replace(
                center.fingerprint(1).encode(), center.fingerprint(2).encode()
            )
            found = box.ask(request._replace(body=swapped))
            back = found.body.replace(
                center.fingerprint(2).encode(), center.fingerprint(1).encode()
            )
            return replace(found, body=back)
        return answer

    center = world.api(world.center)
    assert center.put(envelope(center, 2), 2).status_code == 201
    box = world.link(change)
    site = world.region(upstream=box.url)
    region = world.api(site)
    assert read(region, 1).status_code == 404
    assert site.events(world.admin)["fetch_refused"] == 1
    assert read(region, 2).content == envelope(center, 2)


def test_silent_upstream_delays_reads_by_a_bound_and_is_then_not_asked(world):
    center, link = world.api(world.center), world.link()
    site = world.region(upstream=link.url)
    region = world.api(site)
    assert read(region, 1).status_code == 404  # the upstream confirms the token
    link.change = lambda _, answer: replace(answer, status=503, body=b"")
    assert read(region, 1).status_code == 404
    until(lambda: site.events(world.admin)["up"] == 0)
    asked = len(link.to("artifacts:lookup"))
    assert read(region, 1).status_code == 404
    assert len(link.to("artifacts:lookup")) == asked
    link.change = lambda _, answer: answer
    assert center.put(envelope(center, 1), 1).status_code == 201
    until(lambda: read(region, 1).status_code == 200)
