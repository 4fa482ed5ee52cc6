"""A publish that a region acknowledged reaches the upstream, whichever server is killed."""

import asyncio
import json

import pytest
from sqlalchemy import make_url

from graphstash_schema import Digest
from graphstash_schema.protocol import HEADER_PUBLISHER
from graphstash_server.db.engine import make_engine
from graphstash_server.db.queries.artifacts import unpin_artifacts
from graphstash_server.keys import StoredKey
from support.changes import execute
from support.regions import envelope, read
from support.waiting import until


async def unpin(url, key):
    engine = make_engine(make_url(url))
    async with engine.begin() as connection:
        await unpin_artifacts(connection, [key])
    await engine.dispose()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_publishes_survive_the_death_of_both_servers(world, request, database):
    own = {}
    if database == "postgresql":
        own["GRAPHSTASH_DATABASE_URL"] = request.getfixturevalue("postgres").new_database()
    site = world.region(**own)
    region = world.api(site)
    world.center.kill()
    blobs = {number: envelope(region, number, b"%d" % number * 1000) for number in range(6)}
    for number, blob in blobs.items():
        assert region.put(blob, number, seconds=number).status_code == 201
    assert site.events(world.admin)["queued"] == 6
    site.kill()
    site.start()
    assert {number: read(region, number).content for number in blobs} == blobs
    world.center.start()
    center = world.api(world.center)
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert {number: center.get(number).content for number in blobs} == blobs
    assert center.head(3).headers["graphstash-metadata"]
    assert site.events(world.admin)["publish_sent"] == 6


@pytest.mark.extended
def test_region_killed_while_it_sends_delivers_after_the_restart(world):
    site = world.region()
    region = world.api(site)
    blobs = {number: envelope(region, number, b"x" * 100_000) for number in range(20)}
    for number, blob in blobs.items():
        assert region.put(blob, number).status_code == 201
    site.kill()
    site.start()
    center = world.api(world.center)
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert {number: center.get(number).content for number in blobs} == blobs


def test_first_artifact_at_the_upstream_replaces_those_of_all_regions(world):
    sites = [world.region(), world.region()]
    regions = [world.api(site) for site in sites]
    world.center.kill()
    for number, region in enumerate(regions):
        assert region.put(envelope(region, 1, b"of %d" % number), 1).status_code == 201
    world.center.start()
    for site in sites:
        until(lambda site=site: site.events(world.admin)["queued"] == 0)
    first = world.api(world.center).get(1).content
    assert first in {envelope(regions[0], 1, b"of %d" % number) for number in range(2)}
    assert {read(region, 1).content for region in regions} == {first}
    outcomes = [site.events(world.admin) for site in sites]
    assert sum(each.get("publish_conflict", 0) for each in outcomes) == 1
    withdrawn = [region.http.get("/v1/team/withdrawals").json() for region in regions]
    assert sorted(len(each["withdrawals"]) for each in withdrawn) == [0, 1]


def test_queued_artifacts_are_not_evicted(world):
    site = world.region("--store-limit-bytes", "100000")
    region = world.api(site)
    world.center.kill()
    first = envelope(region, 1, b"x" * 60_000)
    assert region.put(first, 1).status_code == 201
    key = StoredKey.parse_path(f"team/{region.path(1).partition('/artifacts/')[2]}")
    asyncio.run(unpin(site.database_url, key))
    assert region.put(envelope(region, 2, b"y" * 60_000), 2).status_code == 507
    assert read(region, 1).content == first
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert region.put(envelope(region, 2, b"y" * 60_000), 2).status_code == 201


def test_queued_artifact_of_a_token_that_is_revoked_meanwhile_ends_in_the_region(world):
    site = world.region()
    issued = world.center.issue("write:team")
    writer, admin = world.api(site, issued.token), world.api(site)
    assert read(writer, 1).status_code == 404
    world.center.kill()
    assert writer.put(envelope(writer, 1), 1).status_code == 201
    assert admin.put(envelope(admin, 2), 2).status_code == 201
    revoked = f"UPDATE tokens SET revoked_at = created_at WHERE id = '{issued.info.id}'"
    execute(world.center.database_url, revoked)
    world.center.start()
    center = world.api(world.center)
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert [center.get(number).status_code for number in (1, 2)] == [404, 200]
    assert [read(admin, number).status_code for number in (1, 2)] == [404, 200]


def test_upstream_checks_the_publisher_beside_the_region(world):
    center = world.api(world.center, namespace="trusted")
    assert center.http.put("/v1/-/namespaces/trusted", json={"trusted": True}).is_success
    token = world.center.issue("write:trusted").info.id
    exact, pattern = ([{"scope": "write", "namespaces": each}] for each in ("trusted", "*"))
    for number, (publisher, status) in enumerate(
        [
            (json.dumps({"grants": exact}), 201),
            (json.dumps({"grants": exact, "token": token}), 201),
            (json.dumps({"grants": pattern}), 403),
            (json.dumps({"grants": []}), 403),
            (json.dumps({"grants": exact, "token": "a" * 16}), 403),
            ("nonsense", 403),
        ]
    ):
        answer = center.put(envelope(center, number), number, **{HEADER_PUBLISHER: publisher})
        assert answer.status_code == status, answer.text
        assert status == 201 or answer.json()["code"] == "publisher_refused"


def test_publish_that_the_upstream_never_takes_stays_in_the_region(world):
    """The upstream's limit is below the region's."""
    site = world.region()
    region = world.api(site)
    center = world.api(world.center)
    world.center.kill()
    blob = envelope(region, 1, b"x" * 10_000)
    assert region.put(blob, 1).status_code == 201
    world.center.environment["GRAPHSTASH_MAX_ARTIFACT_BYTES"] = "5000"
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert site.events(world.admin)["publish_dropped"] == 1
    assert read(region, 1).content == blob
    assert center.get(1).status_code == 404
    assert str(Digest.of(blob)) not in center.call("lookup", {"keys": [center.key(1)]}).text


def test_queued_artifact_whose_blob_is_absent_for_a_while_is_sent(world, tmp_path):
    """A part of the region's store is not mounted when the upstream is back."""
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    blob = envelope(region, 1)
    world.center.kill()
    assert region.put(blob, 1).status_code == 201
    assert region.put(envelope(region, 2), 2).status_code == 201
    site.kill()
    (path,) = site.directory.rglob(Digest.of(blob).sha256)
    path.rename(tmp_path / "away")
    site.start()
    assert region.get(1).status_code == 404
    world.center.start()
    until(lambda: site.events(world.admin).get("publish_refused", 0) > 0)
    (tmp_path / "away").rename(path)
    until(lambda: center.get(1).status_code == 200)
    assert center.get(1).content == blob
    assert region.get(1).content == blob
