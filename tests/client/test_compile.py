"""Jobs of a team compile each graph once, and a job continues after any failure."""

import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from graphstash._compile.two_call import TwoCallCache
from graphstash_schema import LeaseState
from support.fault_proxy import Fault, FaultProxy
from support.host import Host, file_size_limit, key, request
from support.memory_ranks import MemoryRanks, Values
from support.waiting import until, until_waiting


class Building(Host):
    def build(self, number, *, seconds=0.0, result=b"graph", until=lambda: None):
        """Build a graph. The compilation ends when `until` returns."""

        def compile_payload():
            self.compiles += 1
            time.sleep(seconds)
            until()
            return result

        return self.cache.get_or_compile(key(number), compile_payload, parts={"n": str(number)})


@contextmanager
def uploads_wait(host):
    """Block the upload queue of the host until the end of the block."""
    go_on = threading.Event()
    host.publisher.submit(lambda: go_on.wait(60))
    yield
    go_on.set()


@pytest.fixture
def hosts(start):
    return partial(start, Building)


def test_graph_is_compiled_once_and_downloaded_by_another_host(hosts):
    a, b = hosts("a"), hosts("b")
    assert a.build(1, seconds=0.2) == b"graph"
    assert a.stats.published == 1
    assert b.build(1) == b"graph"
    assert b.build(1) == b"graph"
    assert (a.compiles, b.compiles) == (1, 0)
    stats = b.stats
    assert (stats.hits_server, stats.hits_host, stats.misses) == (2, 0, 0)  # one download
    assert stats.saved_compile_seconds >= 2 * 0.2
    assert stats.fallbacks == {}


def test_concurrent_hosts_compile_a_graph_once(hosts, server):
    herd = [hosts(f"host{n}") for n in range(8)]
    all_wait = partial(until_waiting, server.url, 7)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda host: host.build(1, until=all_wait), herd))
    assert sum(host.compiles for host in herd) == 1
    stats = [host.stats for host in herd]
    assert sum(s.waits for s in stats) == 7
    assert sum(s.misses for s in stats) == 1
    assert all(s.fallbacks == {} for s in stats)


def test_next_waiter_compiles_after_holder_fails(hosts, server):
    holder, waiter = hosts("a"), hosts("b")
    compiling = threading.Event()

    def fails():
        compiling.set()
        until_waiting(server.url)
        raise RuntimeError("no memory")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(holder.cache.get_or_compile, key(1), fails)
        assert compiling.wait(60)
        assert waiter.build(1) == b"graph"
        with pytest.raises(RuntimeError, match="no memory"):
            first.result(60)
    assert waiter.compiles == 1


def test_a_holder_that_dies_is_replaced_within_the_lease_time(hosts):
    waiter = hosts("b", lease_seconds=1.5)
    dead = hosts("a", lease_seconds=1.5).stash.server.acquire(key(1))  # this lease is never renewed
    assert dead.state is LeaseState.GRANTED
    assert waiter.build(1) == b"graph"  # at the end of the lease
    assert waiter.compiles == 1
    assert waiter.stats.fallbacks == {}  # not at the end of the budget


def test_a_holder_that_lives_renews_its_lease(hosts):
    holder, waiter = hosts("a", lease_seconds=9), hosts("b")

    rests = []

    def is_renewed():
        rests.append(waiter.stash.server.acquire(key(1)).expires_in_seconds)
        return rests[-1] > min(rests)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(holder.build, 1, until=lambda: until(is_renewed))
        until(lambda: holder.compiles == 1)
        waiter.build(1)
    assert (holder.compiles, waiter.compiles) == (1, 0)


def test_first_of_two_published_results_stays(hosts):
    a, b = hosts("a"), hosts("b", wait_seconds=0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(a.build, 1, result=b"A", until=lambda: until(lambda: b.compiles == 1))

        def a_has_published():
            assert first.result(60) == b"A"
            assert a.publisher.drain(60)

        until(lambda: a.compiles == 1)
        assert b.build(1, result=b"B", until=a_has_published) == b"B"
    assert (a.stats.published, b.stats.published, b.stats.conflicts) == (1, 0, 1)
    assert hosts("c").build(1) == b"A"
    assert b.build(1) == b"A"  # the losing host also runs the published result


def test_a_full_upload_queue_drops_the_upload_not_the_job(hosts):
    host = hosts("a")
    with uploads_wait(host):
        while host.publisher.submit(lambda: None):
            pass
        assert host.build(1) == b"graph"
    assert host.stats.fallbacks == {"queue_full": 1}
    other = hosts("b")
    assert other.build(1) == b"graph"
    assert other.compiles == 1


def test_results_truncated_by_a_full_disk_leave_no_file_and_are_not_visible(
    hosts, tmp_path, monkeypatch
):
    host = hosts("a")
    payload, destination = tmp_path / "payload", tmp_path / "destination"
    payload.write_bytes(bytes(2000))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    (tmp_path / "full").mkdir()
    with uploads_wait(host):
        with file_size_limit(1000):
            host.cache.begin(request(2)).publish_bytes(bytes(2000), compile_seconds=0)
        assert list((tmp_path / "full").iterdir()) == []
        host.cache.begin(request(1)).publish(payload, compile_seconds=0)
        with file_size_limit(1000):
            assert not host.cache.try_fetch(key(1), destination)
        assert sorted(path.name for path in tmp_path.glob("*") if path.is_file()) == ["payload"]
        assert host.cache.try_fetch(key(1), payload)  # fetch onto the artifact's own file
        assert payload.read_bytes() == bytes(2000)
    assert host.stats.fallbacks == {"local_io": 2}


def test_result_that_waits_for_its_upload_has_no_name_that_a_kill_would_leave(
    hosts, tmp_path, monkeypatch
):
    host, temporary = hosts("a"), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with uploads_wait(host):
        host.cache.begin(request(1)).publish_bytes(b"graph", compile_seconds=0)
        assert list(temporary.iterdir()) == []
        assert host.build(1) == b"graph"
    assert (host.compiles, host.stats.published) == (0, 1)
    assert hosts("b").build(1) == b"graph"


def test_a_read_only_job_takes_no_lease_and_keeps_its_artifacts_to_itself(hosts):
    reader, other = hosts("a", read_only=True), hosts("b")
    for _ in range(2):
        assert reader.build(1) == b"graph"
    assert (reader.compiles, reader.stats.published) == (1, 0)
    assert other.stash.get(key(1)) is None
    assert other.stash.server.acquire(key(1)).state is LeaseState.GRANTED


def test_artifact_damaged_in_transit_stays_and_one_damaged_by_the_server_is_replaced(hosts, server):
    """The damage does not change the size, so only the digest reveals it."""
    graph = b"graph" * 1000
    first = hosts("first")
    first.build(1, result=graph)
    assert first.stats.published == 1
    with FaultProxy(server.port) as proxy:
        proxy.fault = Fault.FLIP
        behind = hosts("behind a bad cable", url=proxy.url)
        assert behind.build(1, result=graph) == graph
        assert (behind.stats.published, behind.stats.fallbacks) == (0, {"digest_mismatch": 1})
    blob = max(
        (server.data_dir / "blobs" / "sha256").rglob("*"),
        key=lambda path: (path.is_file(), path.stat().st_mtime_ns),
    )
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)

    second, third = hosts("second"), hosts("third")
    assert second.build(1, result=graph) == graph
    assert (second.stats.published, second.stats.fallbacks) == (1, {"digest_mismatch": 1})
    assert third.build(1) == graph
    assert [each.compiles for each in (behind, second, third)] == [1, 1, 0]


def test_pending_uploads_survive_closing_of_hook(hosts, tmp_path):
    a, b = hosts("a"), hosts("b")
    with uploads_wait(a):
        finished, _ = (a.cache.fetch_bytes_or_start(request(number)) for number in (1, 2))
        finished.publish_bytes(b"graph", compile_seconds=1)
        a.cache.abandon_unfinished()
    assert a.stats.published == 1
    assert b.build(1) == b"graph"
    assert b.compiles == 0
    # The unfinished compilation has no lease any more.
    assert b.stash.server.acquire(key(2), wait_seconds=10).state is LeaseState.GRANTED


def test_process_finds_its_own_pending_uploads_and_then_its_disk(hosts):
    host = hosts("a", wait_seconds=0.5)
    with uploads_wait(host):
        assert host.build(1) == host.build(1) == b"graph"
        assert host.compiles == 1
    stats = host.stats
    assert (stats.misses, stats.hits_host, stats.published) == (1, 1, 1)
    assert host.build(1) == b"graph"
    assert host.stats.hits_host == 2


def granted_to_another(hosts):
    """Return whether another host is granted the lease of graph 1 within 20 s."""
    return hosts("other").stash.server.acquire(key(1), wait_seconds=20).state is LeaseState.GRANTED


def interrupt(*_):
    raise KeyboardInterrupt


def test_interrupted_look_up_releases_its_lease(hosts):
    with pytest.raises(KeyboardInterrupt):
        hosts("a").cache.fetch_bytes_or_start(replace(request(1), details=interrupt))
    assert granted_to_another(hosts)


def test_interrupt_after_write_of_a_result_leaves_no_lease_and_no_file(
    hosts, tmp_path, monkeypatch
):
    """The interrupt comes before the upload is queued."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "dup", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hosts("a").build(1)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert granted_to_another(hosts)


def test_interrupted_message_to_other_ranks_leaves_no_lease(hosts):
    class Ranks(MemoryRanks):
        def set(self, name, value):
            interrupt() if "/chunk/" in name else super().set(name, value)

    values = Values()
    exchange = TwoCallCache(hosts("a").cache)
    assert exchange.get(request(1), ranks=Ranks(values, 0, 2)) is None
    with pytest.raises(KeyboardInterrupt):
        exchange.put(request(1), b"graph")
    assert granted_to_another(hosts)
    follower = TwoCallCache(hosts("b").cache)
    assert follower.get(request(1), ranks=Ranks(values, 1, 2)) is None  # compiles, as the leader
