"""After a partition, a region neither serves nor sends what its upstream has withdrawn."""

import threading

from support.regions import Site, envelope, read
from support.waiting import until


def elsewhere(world):
    """Return the upstream's server at another address, which its regions do not know."""
    return Site(world.center.directory)


def test_bytes_that_the_upstream_withholds_are_refused_while_it_is_away(world):
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    bad, good = (envelope(center, 1, payload) for payload in (b"bad", b"good"))
    assert center.put(bad, 1).status_code == 201
    assert read(region, 1).content == bad
    center.withhold(bad, 1)
    until(lambda: read(region, 1).status_code == 404)
    world.center.kill()
    answer = region.put(bad, 1)
    assert (answer.status_code, answer.json()["code"]) == (409, "withheld")
    assert read(region, 1).status_code == 404
    # Other bytes for the key may serve the region until the upstream decides.
    assert region.put(good, 1).status_code == 201
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert [read(each, 1).status_code for each in (center, region)] == [404, 404]
    assert site.events(world.admin)["publish_conflict"] == 1


def test_bytes_that_the_upstream_has_released_are_stored_again(world):
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    blob = envelope(center, 1)
    assert center.put(blob, 1).status_code == 201
    assert read(region, 1).content == blob
    center.withhold(blob, 1)
    until(lambda: read(region, 1).status_code == 404)
    assert region.put(blob, 1).status_code == 409
    assert center.call("release", center.key(1)).status_code == 204
    assert region.put(blob, 1).status_code in {200, 201}
    assert read(region, 1).content == blob


def test_queued_bytes_are_sent_only_after_the_withdrawals_of_the_partition(world):
    """The upstream's list of withdrawals arrives late. Bytes that it does not concern arrive."""
    is_queued, looked_up, goes_on = [], [], threading.Event()

    def change(request, answer):
        if is_queued and request.path.endswith("artifacts:lookup"):
            looked_up.append(request)
            if len(looked_up) > 2:
                goes_on.set()
        if is_queued and (request.method == "PUT" or request.path.startswith("/v1/team/withdraw")):
            goes_on.set() if request.method == "PUT" else goes_on.wait(60)
        return answer

    center = world.api(world.center)
    site = world.region(upstream=world.link(change).url)
    region = world.api(site)
    bad, other, good, wrong = (envelope(center, number) for number in (1, 2, 3, 4))
    assert center.put(other, 2).status_code == 201
    assert read(region, 2).content == other  # the region follows the namespace
    world.center.kill()
    for each in ((bad, 1), (good, 3), (wrong, 4)):
        assert region.put(*each).status_code == 201
    with elsewhere(world) as moved:
        there = world.api(moved)
        assert [there.put(*each).status_code for each in ((bad, 1), (wrong, 4))] == [201, 201]
        assert there.delete(1).status_code == 204
        there.withhold(wrong, 4)
    is_queued.append(True)
    world.center.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    for number in (1, 4):
        assert [read(each, number).status_code for each in (center, region)] == [404, 404]
    assert site.events(world.admin)["publish_gone"] == 2
    assert center.get(3).content == good
    assert center.stats()["puts"] == 4


def test_bytes_deleted_in_a_partition_stay_away_from_a_namespace_first_used_in_it(world):
    """The namespace exists before the partition, or not. Later bytes of either one arrive."""
    center = world.api(world.center, namespace="known")
    old = envelope(center, 5)
    assert center.put(old, 5).status_code == 201
    assert center.delete(5).status_code == 204
    site = world.region()
    until(lambda: site.events(world.admin).get("up") == 1)
    regions = [world.api(site, namespace=each) for each in ("known", "new")]
    world.center.kill()
    for each in regions:
        for number in (1, 2, 5):  # 5 was deleted before: a job may store these bytes again
            assert each.put(envelope(each, number), number).status_code == 201
    with elsewhere(world) as moved:
        for each in regions:
            there = world.api(moved, namespace=each.namespace)
            assert there.put(envelope(there, 1), 1).status_code == 201
            assert there.delete(1).status_code == 204
    site.kill()
    world.center.start()
    site.start()
    until(lambda: site.events(world.admin)["queued"] == 0)
    for each in regions:
        there = world.api(world.center, namespace=each.namespace)
        for number, status in ((1, 404), (2, 200), (5, 200)):
            assert [read(site, number).status_code for site in (there, each)] == [status, status]
