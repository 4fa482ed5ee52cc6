"""A graph is leased once over all regions, and each region alone if the upstream is down."""

from concurrent.futures import ThreadPoolExecutor

from graphstash import ClientConfig
from support.host import Host, key
from support.regions import envelope, read
from support.waiting import PATIENT, until


def test_graph_is_leased_once_and_published_to_the_waiter_of_another_region(world):
    sites = [world.region(), world.region()]
    here, there = map(world.api, sites)
    granted = here.acquire(1, holder="here")
    assert granted.status_code == 201
    held = there.acquire(1, holder="there")
    assert (held.status_code, held.json()["holder"]) == (202, "here")
    assert here.renew(granted.json()["token"], 1).status_code == 200
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(there.acquire, 1, wait=50) for _ in range(3)]
        until_waiting_with(world, sites[1], 2)  # one of three asks the upstream
        blob = envelope(here, 1)
        assert here.put(blob, 1, seconds=1).status_code == 201
        assert here.release(granted.json()["token"], "published", 1).status_code == 204
        replies = [each.result(60) for each in waiting]
    assert [reply.json()["state"] for reply in replies] == ["ready"] * 3
    assert read(there, 1).content == blob


def until_waiting_with(world, site, count):
    api = world.api(site)
    until(lambda: api.http.get("/v1/stats").json()["waiters"] >= count)


def test_released_lease_passes_to_another_region(world):
    here, there = (world.api(world.region()) for _ in range(2))
    granted = here.acquire(1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(there.acquire, 1, wait=50)
        until(lambda: world.api(world.center).http.get("/v1/stats").json()["waiters"] == 1)
        assert here.release(granted.json()["token"], "failed", 1).status_code == 204
        assert waiting.result(60).json()["state"] == "granted"


def test_callers_for_whom_a_region_asks_its_upstream_leave_connections_to_others(world):
    site, center = world.region(GRAPHSTASH_MAX_CONNECTIONS="8"), world.api(world.center)
    for number in range(8):
        assert center.acquire(number, ttl_seconds=600).status_code == 201
    with ThreadPoolExecutor(7) as threads:
        asking = [threads.submit(world.api(site).acquire, n, wait=50) for n in range(7)]
        until_waiting_with(world, world.center, 7)
        # Answered at once: the others would have their answers after 50 seconds.
        assert world.api(site).acquire(7, wait=50).status_code == 202
        assert not any(each.done() for each in asking)
        for number in range(7):
            assert center.put(envelope(center, number), number).status_code == 201
        assert {each.result(60).status_code for each in asking} == {200}


def test_region_grants_leases_alone_while_the_upstream_is_down(world):
    site = world.region()
    region = world.api(site)
    world.center.kill()
    granted = region.acquire(1)
    assert granted.status_code == 201
    assert region.acquire(1).status_code == 202
    token = granted.json()["token"]
    assert region.renew(token, 1).status_code == 200
    assert region.release(token, "failed", 1).status_code == 204
    assert region.acquire(1).status_code == 201
    assert site.events(world.admin)["lease_alone"] >= 1


def test_two_hosts_in_two_regions_compile_once(world, tmp_path):
    hosts = []
    for number in range(2):
        config = ClientConfig(
            url=world.region().url,
            token=world.admin,
            namespace="team",
            cache_dir=tmp_path / f"host-{number}",
            **PATIENT,
        )
        hosts.append(Host(config))
    with hosts[0], hosts[1]:
        assert hosts[0].build(key(1)) == b"graph"
        assert hosts[0].stats.published == 1
        assert hosts[1].build(key(1)) == b"graph"
        assert [host.compiles for host in hosts] == [1, 0]
        assert [sum(host.fallbacks.values()) for host in hosts] == [0, 0]
