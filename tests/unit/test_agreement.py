"""Ranks of one job agree on one result through a shared store. Each rank has its own cache."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from graphstash import ClientConfig
from graphstash._compile import ranks as _agreement
from graphstash._compile.two_call import TwoCallCache
from support.host import Host
from support.host import request as request_of
from support.memory_ranks import MemoryRanks, Values
from support.waiting import PATIENT

NOBODY = "http://127.0.0.1:9"
request = partial(request_of, kind="inductor")


class Rank(Host):
    """One rank of a job. On a miss it compiles a result that differs from every other rank's."""

    def __init__(self, config, store):
        super().__init__(config)
        self.exchange = TwoCallCache(self.cache)
        self.store = store

    def ask(self, number, **options):
        return self.exchange.get(request(number), ranks=self.store, **options)

    def load(self, number, *, lease=True, fails=False):
        """Return the result that this rank runs."""
        found = self.ask(number, lease=lease)
        if found is not None:
            return found
        self.compiles += 1
        if fails:
            self.exchange.end()
            return None
        compiled = f"graph {number} as rank {self.store.rank} compiles it".encode()
        self.exchange.put(request(number), compiled)
        return compiled

    def close(self):
        self.exchange.close()
        super().close()


class Job:
    def __init__(self, ranks):
        self.ranks = ranks

    def load(self, number, **options):
        """Let all ranks ask at once, and return the result that each rank runs."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda rank: rank.load(number, **options), self.ranks))

    @property
    def compiles(self):
        return sum(rank.compiles for rank in self.ranks)


@pytest.fixture
def job(server, namespace, tmp_path):
    made = []

    def make(name, *, broken=(), size=4, compiles_together=False, **settings):
        values = Values()
        ranks = []
        for rank in range(size):
            config = ClientConfig.load(
                {},
                cache_dir=tmp_path / name / str(rank),  # each rank on its own host
                url=NOBODY if rank in broken else server.url,
                namespace=namespace,
                **PATIENT | settings,
            )
            store = MemoryRanks(values, rank, size, compiles_together=compiles_together)
            ranks.append(Rank(config, store))
        made.extend(ranks)
        return Job(ranks)

    yield make
    for rank in made:
        rank.close()


def test_one_rank_compiles_and_all_ranks_run_its_result(job):
    cold = job("cold")
    ran = cold.load(1)
    assert len(set(ran)) == 1
    assert cold.compiles == 1
    assert sum(rank.stats.published for rank in cold.ranks) == 1

    warm = job("warm")
    assert warm.load(1) == ran
    assert warm.compiles == 0
    assert all(rank.stats.hits == 1 for rank in warm.ranks)


@pytest.mark.parametrize("broken", [(0,), (1, 3), (0, 1, 2)])
def test_ranks_without_cache_run_results_of_other_ranks(job, broken):
    ran = job("cold").load(1)
    warm = job("warm", broken=broken)
    assert warm.load(1) == ran
    assert warm.compiles == 0
    for number, rank in enumerate(warm.ranks):
        assert (rank.stats.hits, rank.stats.hits_ranks == 1) == (1, number in broken)


def test_few_of_many_ranks_probe_an_unreachable_cache_and_one_compiles_for_all(job, monkeypatch):
    monkeypatch.setattr(_agreement, "_CHUNK_BYTES", 7)
    many = job("a", size=8, broken=range(8))
    assert len(set(many.load(1))) == many.compiles == 1
    words = [name for name in many.ranks[0].store._values.values if name.endswith("/word")]
    assert len(words) == 4


def test_relayed_results_are_bounded_and_not_evicted_by_an_oversized_result(job, monkeypatch):
    monkeypatch.setattr(_agreement, "_RELAY_BYTES", 200)
    (one,) = job("one", size=1).ranks
    for number in range(20):
        one.load(number)
    values = one.store._values.values
    left = {name: len(value) for name, value in values.items() if "/chunk/" in name}
    assert 0 < sum(left.values()) <= 200
    assert one.ask(20) is None
    one.exchange.put(request(20), random.Random(0).randbytes(1000))
    assert [name for name in values if "/chunk/" in name] == list(left)


def test_graph_of_a_single_rank_waits_for_no_rank(job):
    ranks = job("a").ranks
    assert ranks[2].load(1) == b"graph 1 as rank 2 compiles it"
    assert job("b", broken=(1,)).ranks[1].load(2) == b"graph 2 as rank 1 compiles it"


def test_all_ranks_compile_if_compiler_of_leader_fails(job):
    failing = job("a")
    assert failing.load(1, fails=True) == [None] * 4
    assert failing.compiles == 4


@pytest.mark.parametrize("terms", [{"compiles_together": True}, {"wait_seconds": 0}], ids=str)
def test_ranks_that_all_compile_publish_one_result_and_load_it_later(job, terms):
    cold = job("cold", **terms)
    cold.load(1)
    assert cold.compiles == 4
    assert sum(rank.stats.published for rank in cold.ranks) == 1
    warm = job("warm", **terms)
    assert len(set(warm.load(1))) == 1
    assert warm.compiles == 0


def test_ranks_do_not_wait_for_late_results(job):
    late = job("a")
    assert [rank.ask(1, lease=False) for rank in late.ranks] == [None] * 4
    for rank in late.ranks:
        rank.exchange.put(request(1), b"from everybody")
    assert [rank.stats.published for rank in late.ranks] == [1, 0, 0, 0]


@pytest.mark.parametrize("lease", [True, False])
def test_agreement_holds_for_repeated_look_ups(job, lease):
    ranks = job("a", size=2).ranks
    ran = [rank.load(1, lease=lease) for rank in ranks]
    again = [rank.load(1, lease=lease) for rank in ranks]
    assert again == ran
    assert [rank.compiles for rank in ranks] == ([1, 0] if lease else [2, 2])
    assert all(rank.stats.fallbacks == {} for rank in ranks)


@pytest.mark.parametrize("call", ["claim", "set"])
def test_ranks_compile_alone_without_lease_if_store_fails(job, monkeypatch, call):
    def fail(*_, **__):
        raise ConnectionError("the store is gone")

    rank = job("a", size=2, compiles_together=True).ranks[0]
    monkeypatch.setattr(MemoryRanks, call, fail)
    assert rank.load(1) is not None
    assert rank.stats.fallbacks == {"ranks": 1}  # not the fallback of a lease that never ends
    assert rank.stats.published == 1


def test_interrupted_leader_passes_the_lead_on(job, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    first, second = job("a", size=2).ranks
    monkeypatch.setattr(first.cache, "fetch_bytes_or_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.ask(1)
    assert second.load(1) == b"graph 1 as rank 1 compiles it"
    assert second.stats.fallbacks == {}
    monkeypatch.undo()
    assert first.load(1) == b"graph 1 as rank 1 compiles it"


def test_rank_does_not_wait_for_each_piece_of_removed_result(job, monkeypatch):
    monkeypatch.setattr(_agreement, "_CHUNK_BYTES", 7)
    leader, broken = job("a", size=2, broken=(1,)).ranks
    leader.load(1)
    values = leader.store._values.values
    for name in [name for name in values if "/chunk/" in name]:
        del values[name]
    asked = []
    wait = broken.store.wait
    monkeypatch.setattr(
        broken.store, "wait", lambda name, **options: asked.append(name) or wait(name, **options)
    )
    assert broken.load(1) == b"graph 1 as rank 1 compiles it"
    assert len([name for name in asked if "/chunk/" in name]) == 1


def test_second_thread_of_leader_runs_result_of_the_first(job):
    leader, follower = job("a", size=2).ranks
    assert leader.ask(1) is None
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(leader.ask, 1)
        third = pool.submit(follower.ask, 1)
        leader.exchange.put(request(1), b"by the first")
        assert second.result(20) == third.result(20) == b"by the first"
    assert leader.stats.fallbacks == {}


def test_look_up_by_second_thread_keeps_lease_of_the_first(job):
    rank = job("a", size=1).ranks[0]
    assert rank.exchange.get(request(1)) is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(rank.exchange.get, request(1)).result(20) is None
        pool.submit(rank.exchange.end).result(20)
    other = job("b", size=1, wait_seconds=0).ranks[0]
    assert other.exchange.get(request(1)) is None
    assert other.stats.fallbacks == {"wait_budget": 1}


def test_ranks_wait_for_silent_leader_until_its_deadline(job):
    ranks = job("a", size=2, fetch_seconds=0.1, wait_seconds=0.1).ranks
    assert ranks[0].ask(1) is None  # and the compilation never ends
    assert ranks[1].load(1) == b"graph 1 as rank 1 compiles it"
    assert ranks[1].stats.fallbacks == {"ranks": 1}
    assert ranks[1].stats.published == 0


def test_leader_of_an_earlier_release_shares_its_budget(job):
    follower = job("a", size=2).ranks[1]
    name = f"graphstash/{request(1).key}/0"
    follower.store.claim(f"{name}/leader", b"0")
    follower.store.set(f"{name}/word", b'{"word": "each", "wait_left": 7.0}')
    follower.load(1)
    assert (follower.fallbacks, follower.cache.waits.left) == ({}, 7.0)


def test_waits_of_all_ranks_share_budget_of_the_job(job):
    first, second = job("a", size=2, wait_seconds=0.5).ranks
    # The lease is never released.
    assert first.stash.server.acquire(request(1).key).token is not None
    assert first.load(1) is not None
    assert second.load(1) is not None
    assert second.cache.waits.left <= first.cache.waits.left < 0.5
