"""GET /metrics: its counts and its readers. No count decreases when a worker ends."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphstash_server.services.counters import BUCKETS, Counters
from graphstash_server.services.exposition import MAX_LABELLED, OTHER
from graphstash_server.services.named_counts import MAX_NAMES
from graphstash_server.testing import LiveServer
from support.services import key_of
from support.waiting import until

pytestmark = pytest.mark.anyio


def parsed(text):
    """Return the value of each series by name and labels."""
    return {
        (sample.name.removeprefix("graphstash_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(http):
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.text)


def test_requests_hits_waiters_and_refusals_are_counted(tmp_path, connect):
    """Needs its own server, because the counts of other tests arrive with a delay."""
    with LiveServer(tmp_path, flush_seconds=0.05, log_level="error") as server:
        api = connect(server.url)
        before = scrape(api.http)
        assert (before["workers",], before["database_up",]) == (1, 1)
        api.put(b"blob", 1, seconds=2.5)
        assert api.get(1).content == b"blob"
        assert api.get(1, X_Unheard_Of="behind the fast path").content == b"blob"
        assert api.get(2).status_code == 404
        assert api.http.head(api.path(1)).status_code == 200
        assert api.put(b"other", 1).status_code == 409
        token = api.acquire(3).json()["token"]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(connect(server.url).acquire, 3, wait=30)
            until(lambda: scrape(api.http)["lease_waiters",] == 1)
            api.release(token, "failed", 3)
            assert waiting.result().status_code == 201

        lagging = ("hits_total", "misses_total", "puts_total", "artifacts")  # read with a delay
        until(lambda: [scrape(api.http)[name,] for name in lagging] == [2, 1, 1, 1])
        until(lambda: scrape(api.http)["lease_waiters",] == 0)
        counted = scrape(api.http)
    for labels, count in {
        ("requests_total", "PUT", "201"): 1,
        ("refused_total", "not_found"): 1,
        ("refused_total", "conflict"): 1,
        ("strange_headers_total", "x-unheard-of"): 1,
        ("saved_compile_seconds_total",): 5.0,
        ("served_bytes_total",): 8,
    }.items():
        assert counted[labels] == count, labels
    assert counted["requests_total", "GET", "200"] >= 2 + 1  # and the requests of this test
    assert counted["store_bytes",] >= 4096
    assert counted["request_seconds_count",] >= 4
    assert counted["request_seconds_bucket", "+Inf"] == counted["request_seconds_count",]


@pytest.mark.parametrize("setting", ["off", "loopback"])
def test_setting_restricts_the_readers_of_metrics(tmp_path, setting):
    """By default, every caller may read them, as other tests do on the shared server."""
    proxied = {"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}
    with LiveServer(tmp_path, metrics=setting, log_level="error") as server:
        for headers in ({}, *proxied, {"Via": "1.1 proxy"}, {"X-Real-IP": "::1"}):
            answer = httpx.get(f"{server.url}/metrics", headers=headers, trust_env=False)
            if setting == "off":
                assert answer.status_code == 404
                assert "GRAPHSTASH_METRICS" in answer.text
            else:
                assert answer.status_code == (403 if headers else 200), answer.text
            assert ("graphstash_" in answer.text) == answer.is_success


@pytest.mark.sql
async def test_series_per_namespace_are_limited(opened):
    async with opened(store_limit_bytes=10**9) as server:
        for number in range(MAX_LABELLED + 5):
            where = f"team-{number:02}"
            await server.put(b"blob", namespace=where)
            key = key_of(0, where)
            for _ in range(number):
                server.context.accounting.count_miss(key)
        await server.context.accounting.flush()

        found = parsed((await server.context.exposition.read()).decode())
        misses = {key[1]: found[key] for key in found if key[0] == "namespace_misses_total"}
        assert len(misses) == MAX_LABELLED + 1
        assert misses[OTHER] == 0 + 1 + 2 + 3 + 4
        assert misses["team-54"] == 54
        assert sum(misses.values()) == found["misses_total",]
        stored = {key[1]: found[key] for key in found if key[0] == "namespace_bytes"}
        assert stored.keys() == misses.keys()
        assert sum(stored.values()) == found["store_bytes",] == 4096 * (MAX_LABELLED + 5)
        assert found["store_limit_bytes",] == 10**9
        assert not any(key_of().fingerprint in label for key in found for label in key)


async def test_expired_lease_is_counted(opened):
    async with opened() as server:

        async def expired():
            found = parsed((await server.context.exposition.read()).decode())
            return found["leases_expired_total",], found["leases_held",], found["lease_waiters",]

        first = await server.acquire(ttl_seconds=1)
        assert await expired() == (0, 1, 0)
        opened.clock.turn(2)
        assert await expired() == (0, 0, 0)
        second = await server.acquire(ttl_seconds=1)
        assert await expired() == (1, 1, 0)
        assert second.fencing > first.fencing
        await server.context.leases.release(key_of(), token=second.token)
        await server.acquire(ttl_seconds=1)
        assert await expired() == (1, 1, 0)


def test_every_series_has_help_and_type(live_server, api):
    families = list(text_string_to_metric_families(api.http.get("/metrics").text))
    assert len(families) > 20
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert family.type in {"counter", "gauge", "histogram", "info"}, family.name
        assert family.name.startswith("graphstash_")
    if "postgresql" in str(live_server._settings.database_url):
        until(lambda: scrape(api.http)["listener_connected",] == 1)
    else:
        assert ("listener_connected",) not in scrape(api.http)


def test_counters_never_decrease_when_worker_is_killed_or_replaced(start, connect):
    server = start("--workers", "2")
    connect(server.url).put(b"blob", 1)

    def ask(times):
        for _ in range(times):  # a new connection each time, to either worker
            assert connect(server.url).get(1, X_Unheard_Of="1").status_code == 200

    def scraped():
        return scrape(connect(server.url).http)

    ask(40)
    first = scraped()
    assert first["workers",] == 2
    assert first["requests_total", "GET", "200"] == 40
    for number, pid in enumerate(server.workers, 3):
        server.kill_worker(pid)
        until(lambda number=number: server.log.count(" serves\n") == number)
    second = scraped()
    assert second["workers",] == 2
    assert second["requests_total", "GET", "200"] > 40  # and the scrapes
    assert second["requests_total", "PUT", "201"] == 1
    ask(10)
    last = scraped()
    assert last["requests_total", "GET", "200"] >= second["requests_total", "GET", "200"] + 10
    assert last["strange_headers_total", "x-unheard-of"] == 50


def test_names_of_unrecognized_headers_are_limited():
    counters = Counters.alone()
    names = [f"{number:02}-{'a' * 80}" for number in range(MAX_NAMES + 5)]
    for _ in range(2):
        counters.count_unrecognized_headers(names)
    counted = counters.host.sums().unrecognized_headers
    assert counted == {**{name[:64]: 2 for name in names[:MAX_NAMES]}, OTHER: 10}

    successor = counters.host.of(0)
    successor.count_unrecognized_headers([names[3], "new"])
    changed = {names[3][:64]: 3, OTHER: 11}
    assert counters.host.sums().unrecognized_headers == counted | changed


def test_unusual_methods_statuses_and_durations_are_counted():
    counters = Counters.alone()
    for method, status in (("GET", 299), ("BREW", 200), ("\xff", 777), ("other", 200)):
        counters.count_request(method, status)
    for seconds in (0.0, 0.005, 0.0051, 60.0, 3600.0):
        counters.count_seconds(seconds)
    sums = counters.host.sums()
    assert sums.requests == {("GET", "other"): 1, ("other", "200"): 2, ("other", "other"): 1}
    assert list(sums.seconds) == [2, 1, *[0] * (len(BUCKETS) - 3), 1, 1]
    assert sums.total_seconds == pytest.approx(3660.0101)
