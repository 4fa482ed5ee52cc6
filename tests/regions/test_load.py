"""One slow transfer, a busy upstream or a crowd of callers delays nothing else in a region."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from support.api import DEVICE
from support.changes import execute
from support.regions import envelope, read
from support.waiting import until


def test_leases_that_wait_at_the_upstream_do_not_delay_reads(world):
    center = world.api(world.center)
    site = world.region(GRAPHSTASH_UPSTREAM_ANSWER_SECONDS="5")
    region = world.api(site)
    assert center.put(envelope(center, 100), 100).status_code == 201
    for number in range(70):
        assert center.acquire(number, ttl_seconds=600).status_code == 201
    with ThreadPoolExecutor(70) as threads:
        waiting = [threads.submit(region.acquire, number, wait=50) for number in range(70)]
        until(lambda: center.http.get("/v1/stats").json()["waiters"] >= 64)
        assert read(region, 100).status_code == 200
        assert "does without it" not in site.server.log
        world.center.kill()  # ends the waits
        assert {each.result(60).status_code for each in waiting} == {201}


def test_upstream_without_room_or_time_for_a_publish_is_not_down(world):
    link = world.link()
    site = world.region(upstream=link.url)
    region = world.api(site)
    for status in (429, 503, 507):
        link.change = lambda request, answer, status=status: (
            replace(answer, status=status, headers=answer.headers | {"retry-after": "1"})
            if request.method == "PUT"
            else answer
        )
        outcome = "publish_refused" if status == 507 else "publish_failed"
        before = site.events(world.admin).get(outcome, 0)
        assert region.put(envelope(region, status), status).status_code == 201
        until(lambda: site.events(world.admin).get(outcome, 0) > before)  # noqa: B023 - called now
        link.change = lambda _, answer: answer
        until(lambda: site.events(world.admin)["queued"] == 0)
    assert "does without it" not in site.server.log


def test_made_up_tokens_do_not_delay_callers_whom_the_upstream_has_confirmed(world):
    is_over = threading.Event()

    def change(request, answer):
        if answer.status == 401:
            is_over.wait(60)
        return answer

    site = world.region(upstream=world.link(change).url)
    known, unknown = (world.api(site, world.center.token("read:team")) for _ in range(2))
    assert known.http.get("/v1/stats").status_code == 200
    site.kill()
    site.start()  # only the database has the confirmation

    def guess(number):
        token = f"gst_{'a' * 16}_{number:043d}"
        headers = {"Authorization": f"Bearer {token}"}
        return known.http.get("/v1/stats", headers=headers)

    with ThreadPoolExecutor(90) as threads:
        guesses = [threads.submit(guess, number) for number in range(90)]
        until(lambda: sum(each.done() for each in guesses) == 90 - 64)
        refused = [each.result() for each in guesses if each.done()]
        assert {each.status_code for each in refused} == {503}
        assert {each.headers["retry-after"] for each in refused} == {"1"}
        assert known.http.get("/v1/stats").status_code == 200
        assert unknown.http.get("/v1/stats").status_code == 503
        is_over.set()
        assert sum(each.result(60).status_code == 401 for each in guesses) == 64
    until(lambda: unknown.http.get("/v1/stats").status_code == 200)


def test_confirmed_token_is_valid_while_it_is_renewed(world):
    may_answer = threading.Event()
    issued = world.center.issue("read:team")

    def questions():
        return [
            each
            for each in link.to("/-/access")
            if each.headers["authorization"] == f"Bearer {issued.token}"
        ]

    def change(request, answer):
        if request in questions()[1:]:
            may_answer.wait(60)
        return answer

    link = world.link(change)
    site = world.region(upstream=link.url)
    reader = world.api(site, issued.token)
    statuses = []

    def is_renewed():
        statuses.append(reader.http.get("/v1/stats").status_code)
        return len(questions()) == 2

    until(is_renewed)
    is_renewed()
    assert set(statuses) == {200}
    assert len(questions()) == 2
    assert "does without it" not in site.server.log  # no request has waited for the answer
    may_answer.set()


def now():
    """Return the time as SQLite stores it."""
    return datetime.now(UTC).replace(tzinfo=None)


def time_of(site, column, table):
    """Return the only time in a column of a region's database."""
    with sqlite3.connect(site.directory / "graphstash.sqlite3") as database:
        ((text,),) = database.execute(f"SELECT {column} FROM {table}").fetchall()
    return datetime.fromisoformat(text)


@pytest.mark.extended
def test_download_of_a_killed_process_is_repeated_within_half_a_minute(world):
    may_end = threading.Event()

    def change(request, answer):
        if request.method == "GET" and "/artifacts/" in request.path:
            may_end.wait(120)
        return answer

    center = world.api(world.center)
    blob = envelope(center, 1, b"x" * 10_000)
    assert center.put(blob, 1).status_code == 201
    link = world.link(change)
    site = world.region(
        "--workers", "2", upstream=link.url, GRAPHSTASH_UPSTREAM_ANSWER_SECONDS="60"
    )
    region = world.api(site)
    assert region.get(1).status_code == 503
    first = time_of(site, "claimed_until", "upstream_downloads")
    until(lambda: time_of(site, "claimed_until", "upstream_downloads") > first)  # renewed
    site.kill()
    end = time_of(site, "claimed_until", "upstream_downloads")
    assert end - now() <= timedelta(seconds=30)
    may_end.set()
    site.start()
    assert read(region, 1).content == blob


@pytest.mark.extended
def test_downloads_of_another_process_take_no_slot(world):
    center, site = world.api(world.center), world.region("--workers", "2")
    for number in range(44):
        assert center.put(envelope(center, number), number).status_code == 201
    end = now() + timedelta(seconds=55)
    regions = [world.api(site) for _ in range(8)]
    for number in range(40):
        execute(
            site.database_url,
            "INSERT INTO upstream_downloads (namespace, fingerprint, kind, device_type,"
            f" claimed_until) VALUES ('team', '{center.fingerprint(number)}', 'jax', '{DEVICE}',"
            f" '{end.isoformat(' ', 'microseconds')}')",
        )
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda each: regions[each % 8].get(each), range(40)))
        assert {each.status_code for each in answers} == {503}
    for number, region in enumerate(regions):
        assert read(region, 40 + number // 2).status_code == 200
    assert now() < end  # the claims of the other process still hold


def test_slow_upload_delays_no_other_one_and_keeps_claim_and_lease(world):
    may_end = threading.Event()
    center, link = world.api(world.center), world.link()
    ask = link.ask

    def ask_late(request):
        if request.method == "PUT" and request.path == center.path(1):
            may_end.wait(120)
        return ask(request)

    link.ask = ask_late
    site = world.region(upstream=link.url, GRAPHSTASH_UPSTREAM_ANSWER_SECONDS="60")
    region = world.api(site)
    token = region.acquire(1, ttl_seconds=12).json()["token"]
    assert region.put(envelope(region, 1), 1).status_code == 201
    assert region.release(token, "published", 1).status_code == 204
    until(lambda: link.to("/artifacts/", method="PUT"))
    first = time_of(site, "next_at", "upstream_publishes")
    for number in range(2, 8):
        assert region.put(envelope(region, number), number).status_code == 201
    until(lambda: site.events(world.admin)["queued"] == 1)
    until(lambda: time_of(site, "next_at", "upstream_publishes") > first)
    held = center.acquire(1)
    assert (held.status_code, held.json()["holder"]) == (202, "the queue of a region")
    may_end.set()
    until(lambda: site.events(world.admin)["queued"] == 0)
    assert {center.get(number).status_code for number in range(1, 8)} == {200}
