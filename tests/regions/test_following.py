"""What the upstream withdraws, revokes or forbids ends in its regions."""

import json
import re
import shutil
import threading
from contextlib import closing

import pytest

from graphstash_schema import Digest
from support.changes import execute
from support.issuer import Issuer
from support.processes import graphstash
from support.regions import Site, envelope, read
from support.sessions import sign_in
from support.waiting import until


def test_withdrawn_artifact_ends_in_the_region_and_on_its_list(world):
    center, region = world.api(world.center), world.api(world.region())
    blobs = {number: envelope(center, number) for number in (1, 2)}
    for number, blob in blobs.items():
        assert center.put(blob, number).status_code == 201
        assert read(region, number).content == blob
    assert center.delete(1).status_code == 204
    until(lambda: read(region, 1).status_code == 404)
    listed = region.http.get("/v1/team/withdrawals").json()["withdrawals"]
    assert {each["key"].rpartition("/")[2] for each in listed} == {region.fingerprint(1)}
    assert read(region, 2).content == blobs[2]


def test_artifact_that_is_withdrawn_during_its_download_is_not_served(world):
    is_sent, go_on = threading.Event(), threading.Event()

    def change(request, answer):
        if request.method == "GET" and "/artifacts/" in request.path:
            is_sent.set()
            go_on.wait(60)
        return answer

    center = world.api(world.center)
    assert center.put(envelope(center, 1), 1).status_code == 201
    assert center.put(envelope(center, 2), 2).status_code == 201
    site = world.region(upstream=world.link(change).url)
    region = world.api(site)
    reading = threading.Thread(target=read, args=(region, 1))
    reading.start()
    assert is_sent.wait(60)
    assert center.delete(1).status_code == 204
    until(lambda: site.events(world.admin).get("withdrawn", 0) == 1)
    go_on.set()
    reading.join(60)
    until(lambda: read(region, 1).status_code == 404)
    assert read(region, 2).status_code == 200


def test_region_compares_its_copies_after_a_gap_in_the_list(world):
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    for number in (1, 2):
        assert center.put(envelope(center, number), number).status_code == 201
        assert read(region, number).status_code == 200
    site.kill()
    for number in (3, 4, 5):
        assert center.put(envelope(center, number), number).status_code == 201
        assert center.delete(number).status_code == 204
    assert center.delete(1).status_code == 204
    # As if the entries were too old.
    execute(world.center.database_url, "DELETE FROM withdrawals WHERE number < 3")
    site.start()
    until(lambda: read(region, 1).status_code == 404)
    assert read(region, 2).status_code == 200
    # A job stores the same bytes again.
    assert region.put(envelope(region, 1), 1).status_code == 201
    assert read(region, 1).status_code == 200
    until(lambda: center.get(1).status_code == 200)


@pytest.mark.parametrize("before", [0, 2], ids=["whole", "without its first entry"])
def test_upstream_restored_from_a_backup_ends_only_what_its_list_names(world, tmp_path, before):
    """With an entry that the region has applied, the region has missed none before it."""
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    lost, later, kept, own = range(before + 1, before + 5)
    for number in range(1, own):
        assert center.put(envelope(center, number), number).status_code == 201
        assert read(region, number).status_code == 200

    def withdraw(number):
        assert center.delete(number).status_code == 204
        until(lambda: read(region, number).status_code == 404)

    for number in range(1, lost):
        withdraw(number)
    world.center.kill()
    shutil.copytree(tmp_path / "center", tmp_path / "backup")
    world.center.start()
    until(lambda: site.events(world.admin).get("up") == 1)
    assert region.put(envelope(region, own), own).status_code == 201
    until(lambda: center.get(own).status_code == 200)
    withdraw(lost)

    world.center.kill()
    shutil.rmtree(tmp_path / "center")
    shutil.copytree(tmp_path / "backup", tmp_path / "center")
    # As if the first entry were too old.
    execute(world.center.database_url, "DELETE FROM withdrawals WHERE number < 2")
    world.center.start()
    withdraw(later)
    assert [read(region, number).status_code for number in (kept, own)] == [200, 200]
    listed = region.http.get("/v1/team/withdrawals").json()["withdrawals"]
    names = {each["key"].rpartition("/")[2] for each in listed}
    assert names == {region.fingerprint(number) for number in range(1, kept)}


def test_revoked_token_is_refused_by_the_region(world):
    site = world.region()
    issued = world.center.issue("read:team")
    reader = world.api(site, issued.token)
    assert read(reader, 1).status_code == 404
    assert reader.put(envelope(reader, 1), 1).status_code == 403
    admin = world.api(world.center)
    assert admin.http.delete(f"/v1/-/tokens/{issued.info.id}").status_code == 204
    until(lambda: reader.http.get("/v1/stats").status_code == 401)
    assert read(reader, 1).status_code == 401


def test_tokens_are_accepted_without_upstream_only_if_it_has_confirmed_them(world):
    site = world.region()
    known = world.api(site, world.center.token("read:team"))
    unknown = world.api(site, world.center.token("read:team"))
    assert known.http.get("/v1/stats").status_code == 200
    world.center.kill()
    site.kill()
    site.start()
    assert known.http.get("/v1/stats").status_code == 200
    assert unknown.http.get("/v1/stats").status_code == 503
    assert world.api(site, "gst_" + "a" * 16 + "_" + "b" * 43).get(1).status_code == 503
    assert world.api(site, "nonsense").http.get("/v1/stats").status_code == 401


def test_no_token_is_accepted_without_upstream_if_the_time_is_over(world):
    site = world.region(GRAPHSTASH_UPSTREAM_OFFLINE_SECONDS="0")
    reader = world.api(site)
    assert reader.http.get("/v1/stats").status_code == 200
    world.center.kill()
    until(lambda: reader.http.get("/v1/stats").status_code == 503)


def test_upstream_exchanges_a_jwt_that_a_job_sends_to_its_region(world, tmp_path):
    with Issuer() as issuer:
        issuer.add_key("first")
        rules = [{"claims": {"repository": "team/*"}, "grants": ["write:team"]}]
        center = Site(
            tmp_path / "with-oidc",
            GRAPHSTASH_OIDC_ISSUER=issuer.url,
            GRAPHSTASH_OIDC_AUDIENCE="graphstash",
            GRAPHSTASH_OIDC_RULES=json.dumps(rules),
        )
        with center, Site.region(tmp_path / "r", center.url, center.token("write:*")) as site:
            ci = world.api(site, issuer.token("first"))
            issued = ci.http.post("/v1/-/tokens:exchange", json={})
            assert issued.status_code == 201, issued.text
            job = world.api(site, issued.json()["token"])
            assert job.put(envelope(job, 1), 1).status_code == 201
            here = world.api(center, issued.json()["token"])
            until(lambda: here.get(1).status_code == 200)


def test_report_in_a_region_counts_at_the_upstream(world):
    center, site = world.api(world.center), world.region()
    region = world.api(site)
    blob = envelope(center, 1)
    assert center.put(blob, 1).status_code == 201
    assert read(region, 1).content == blob
    writers = [world.api(site, world.center.token("write:team")) for _ in range(2)]
    for writer in writers:
        assert writer.report(blob, 1).json()["found"]
    assert center.get(1).status_code == 404
    held = center.http.get("/v1/-/quarantine").json()["artifacts"]
    assert [each["digest"] for each in held] == [str(Digest.of(blob))]


def test_open_upstream_makes_no_caller_an_administrator(world, tmp_path):
    with Site(tmp_path / "open", GRAPHSTASH_AUTH="none") as center:
        region = world.region(upstream=center.url)
        text = "gst_" + "a" * 16 + "_" + "b" * 43
        assert world.api(region, text).http.get("/v1/-/tokens").status_code == 401


def test_policy_of_the_upstream_holds_in_the_region(world):
    site = world.region()
    rules = {"trusted": True}
    center = world.api(world.center, namespace="trusted")
    assert center.http.put("/v1/-/namespaces/trusted", json=rules).status_code == 200
    stars = world.api(site, world.center.token("write:*"), namespace="trusted")
    named = world.api(site, world.center.token("write:trusted"), namespace="trusted")
    until(lambda: stars.put(envelope(stars, 1), 1).status_code == 403)
    assert named.put(envelope(named, 2), 2).status_code == 201
    until(lambda: center.get(2).status_code == 200)
    assert center.http.put("/v1/-/namespaces/trusted", json={"mode": "read_only"}).is_success
    until(lambda: named.put(envelope(named, 3), 3).status_code == 403)
    assert center.http.delete("/v1/-/namespaces/trusted").status_code == 204
    until(lambda: stars.put(envelope(stars, 4), 4).status_code == 201)


def test_changes_of_the_owner_are_refused_in_a_region(world):
    region = world.api(world.region())
    for method, path in (
        ("POST", "/v1/-/tokens"),
        ("DELETE", region.path(1)),
        ("PUT", "/v1/-/namespaces/team"),
        ("DELETE", "/v1/-/namespaces/team"),
    ):
        answer = region.http.request(method, path, json={} if method == "PUT" else None)
        assert answer.status_code == 403, path
        assert world.center.url in answer.json()["detail"]


def test_dashboard_of_a_region_takes_its_own_tokens_and_refuses_what_the_upstream_owns(world):
    region = world.region()
    with closing(sign_in(region.url, world.admin)) as stranger:
        assert stranger.answer.status_code == 403
        assert "the upstream of this region has issued the token" in stranger.answer.text
    with closing(sign_in(region.url, region.token("admin:*"))) as visitor:
        csrf = re.search(r'name="csrf" value="([^"]+)"', visitor.get("/tokens").text)[1]
        for action in ("delete", "limit", "create-token"):
            origin = {"Origin": region.url}
            answer = visitor.post(f"/actions/{action}", data={"csrf": csrf}, headers=origin)
            assert answer.status_code == 403
            assert world.center.url in answer.text


def test_command_refuses_what_the_upstream_owns(world):
    region = world.region()
    until(lambda: world.api(region).http.get("/v1/-/namespaces").status_code == 200)
    for words in ("set team --mode read_only", "remove team", "clear team --yes"):
        # Without GRAPHSTASH_UPSTREAM_URL: the database names the upstream.
        done = graphstash("namespace", *words.split(), GRAPHSTASH_DATA_DIR=region.directory)
        assert done.returncode == 1
        assert "is a region of another server, which owns its namespaces" in done.stderr


def test_region_that_is_started_without_its_upstream_owns_its_namespaces(world):
    site = world.region()
    token = site.token("admin:*")
    site.kill()
    site.environment = {"GRAPHSTASH_AUTH": "tokens"}
    site.start()
    rules = {"mode": "read_only"}
    answer = world.api(site, token).http.put("/v1/-/namespaces/team", json=rules)
    assert answer.status_code == 200
