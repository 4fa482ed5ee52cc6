"""A server starts as a region only of a server that owns its namespaces."""

import pytest

from support.regions import Site, envelope


def refusal(site):
    with pytest.raises(RuntimeError) as caught:
        site.start()
    return str(caught.value)


def test_region_of_itself_is_refused(world):
    own = Site(world.center.directory)
    own.environment |= {
        "GRAPHSTASH_UPSTREAM_URL": world.center.url,
        "GRAPHSTASH_UPSTREAM_TOKEN": world.admin,
    }
    assert "is this server itself" in refusal(own)


def test_region_of_a_region_is_refused(world):
    region = world.region()
    other = world.region(upstream=region.url, is_started=False)
    assert f"{region.url} is itself a region" in refusal(other)


def test_upstream_that_becomes_a_region_of_its_region_is_refused(world):
    site = world.region()
    world.center.kill()
    world.center.environment |= {
        "GRAPHSTASH_UPSTREAM_URL": site.url,
        "GRAPHSTASH_UPSTREAM_TOKEN": site.token("admin:*"),
    }
    assert f"{site.url} is itself a region" in refusal(world.center)


def test_store_of_another_upstream_is_refused(world, tmp_path):
    site = world.region()
    site.kill()
    with Site(tmp_path / "other") as other:
        moved = Site.region(site.directory, other.url, other.token("admin:*"))
        assert "is another server than the one whose artifacts this region keeps" in refusal(moved)


def test_token_that_cannot_read_every_namespace_of_the_upstream_is_refused(world):
    center = world.api(world.center)
    assert center.http.put("/v1/-/namespaces/trusted", json={"trusted": True}).is_success
    site = world.region(is_started=False)
    site.environment["GRAPHSTASH_UPSTREAM_TOKEN"] = world.center.token("write:team")
    assert "cannot read every namespace" in refusal(site)


def test_region_without_authentication_is_refused(world):
    site = world.region(is_started=False)
    site.environment["GRAPHSTASH_AUTH"] = "none"
    assert "GRAPHSTASH_UPSTREAM_URL needs GRAPHSTASH_AUTH=tokens" in refusal(site)


def test_store_with_artifacts_of_its_own_is_refused(world, tmp_path):
    with Site(tmp_path / "own") as own:
        api = world.api(own, own.token("admin:*"))
        assert api.put(envelope(api, 1), 1).status_code == 201
    moved = Site.region(tmp_path / "own", world.center.url, world.admin)
    assert "has artifacts that are not from an upstream" in refusal(moved)


def test_first_start_needs_the_upstream_and_its_token(world):
    wrong = Site.region(world.center.directory.parent / "new", world.center.url, "wrong")
    assert "refuses GRAPHSTASH_UPSTREAM_TOKEN" in refusal(wrong)
    site = world.region(is_started=False)
    world.center.kill()
    assert "needs its upstream for the first start" in refusal(site)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"GRAPHSTASH_UPSTREAM_URL": "center.example"}, "GRAPHSTASH_UPSTREAM_URL=center.example"),
        ({"GRAPHSTASH_UPSTREAM_TOKEN": "t"}, "needs GRAPHSTASH_UPSTREAM_URL"),
        (
            {
                "GRAPHSTASH_UPSTREAM_URL": "https://center.example",
                "GRAPHSTASH_UPSTREAM_CA_FILE": "/nowhere.pem",
            },
            "GRAPHSTASH_UPSTREAM_CA_FILE=/nowhere.pem cannot be used",
        ),
    ],
)
def test_wrong_setting_is_named(tmp_path, variables, message):
    assert message in refusal(Site(tmp_path / "region", **variables))
