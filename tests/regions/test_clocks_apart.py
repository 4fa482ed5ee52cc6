"""Tokens, leases, publishes and withdrawals work although the clocks of a region and its upstream
differ by ten minutes.
"""

from datetime import UTC, datetime, timedelta

import pytest

from support.changes import execute
from support.clocks import HostClock
from support.regions import envelope, read
from support.waiting import until

TEN_MINUTES = timedelta(minutes=10)

pytestmark = pytest.mark.extended


@pytest.fixture(params=[TEN_MINUTES, -TEN_MINUTES], ids=["ahead", "behind"])
def site(request, world, tmp_path):
    """A region whose clock is apart from that of the upstream."""
    clock = HostClock(tmp_path)
    clock.set(request.param)
    return world.region(**clock.environment)


def test_expiry_and_revocation_follow_the_upstreams_clock(world, site):
    admin = world.api(world.center)
    now = datetime.now(UTC)
    tokens = {}
    for minutes in (5, 60):
        body = {
            "description": f"valid for {minutes} minutes",
            "grants": [{"scope": "read", "namespaces": "team"}],
            "expires_at": (now + timedelta(minutes=minutes)).isoformat(),
        }
        tokens[minutes] = admin.http.post("/v1/-/tokens", json=body).json()
        reader = world.api(site, tokens[minutes]["token"])
        assert reader.http.get("/v1/stats").status_code == 200
    passed = "UPDATE tokens SET expires_at = created_at WHERE id = '{}'"
    execute(world.center.database_url, passed.format(tokens[5]["info"]["id"]))
    assert admin.http.delete(f"/v1/-/tokens/{tokens[60]['info']['id']}").status_code == 204
    for each in tokens.values():
        reader = world.api(site, each["token"])
        until(lambda reader=reader: reader.http.get("/v1/stats").status_code == 401)


def test_a_graph_is_compiled_once(world, site):
    region, center = world.api(site), world.api(world.center)
    assert region.acquire(1).status_code == 201
    assert center.acquire(1).json()["state"] == "held"
    blob = envelope(region, 1)
    assert region.put(blob, 1).status_code == 201
    until(lambda: center.acquire(1, wait=20).json()["state"] == "ready")
    assert center.get(1).content == blob
    # The other way round, and a lease that ends without an artifact.
    assert center.acquire(2, ttl_seconds=2).status_code == 201
    assert region.acquire(2).json()["state"] == "held"
    until(lambda: region.acquire(2, wait=20).json()["state"] == "granted")


def test_withdrawals_and_publishes_of_a_partition_arrive(world, site):
    center, region = world.api(world.center), world.api(site)
    blobs = {number: envelope(center, number) for number in (1, 2, 3)}
    for number in (1, 2):
        assert center.put(blobs[number], number).status_code == 201
        assert read(region, number).content == blobs[number]
    center.withhold(blobs[1], 1)
    until(lambda: read(region, 1).status_code == 404)
    world.center.kill()
    assert region.put(blobs[1], 1).status_code == 409
    assert region.put(blobs[3], 3).status_code == 201
    assert {number: read(region, number).content for number in (2, 3)} == {
        number: blobs[number] for number in (2, 3)
    }
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert center.get(3).content == blobs[3]
    assert [read(each, 1).status_code for each in (center, region)] == [404, 404]


def test_clock_that_is_set_during_a_partition_delays_nothing(world, tmp_path):
    clock = HostClock(tmp_path)
    site = world.region(**clock.environment)
    region, center = world.api(site), world.api(world.center)
    world.center.kill()
    for number, ahead in enumerate((timedelta(), TEN_MINUTES, -TEN_MINUTES)):
        clock.set(ahead)
        assert region.put(envelope(region, number), number).status_code == 201
        assert region.acquire(10 + number).status_code == 201
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    for number in range(3):
        assert center.get(number).content == envelope(center, number)
    assert center.delete(1).status_code == 204
    until(lambda: read(region, 1).status_code == 404)


def test_caller_is_confirmed_for_a_time_of_the_regions_clock(world, tmp_path):
    clock = HostClock(tmp_path)
    site = world.region(GRAPHSTASH_UPSTREAM_OFFLINE_SECONDS="300", **clock.environment)
    reader = world.api(site)
    assert reader.http.get("/v1/stats").status_code == 200
    world.center.kill()
    clock.set(TEN_MINUTES)
    until(lambda: reader.http.get("/v1/stats").status_code == 503)
    refusal = reader.http.get("/v1/stats").json()["detail"]
    assert "the token cannot be checked" in refusal
    world.center.start()
    until(lambda: reader.http.get("/v1/stats").status_code == 200)
