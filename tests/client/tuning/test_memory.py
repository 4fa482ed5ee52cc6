"""Hosts of one team tune one kernel. Each host is a process with its own local tier."""

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from graphstash._compile.cache import CompileCache
from graphstash._compile.stats import Counters
from graphstash._executor import BoundedExecutor
from graphstash.tuning.memory import journal
from graphstash.tuning.memory.findings import Finding, merge
from graphstash.tuning.memory.journal import Journal, in_turns
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.memory.team import TeamMemory
from graphstash.tuning.space import MAX_COST
from graphstash.tuning.spaces import ParameterSpace
from graphstash_schema import DeviceType
from graphstash_schema.explanation import SCHEDULE_PART, SPEEDUP_PART, make_description
from graphstash_schema.listing import ArtifactQuery
from support.cases import tiles
from support.memory_ranks import MemoryRanks, Values
from support.signing import Team
from support.tiers import most_extended
from support.waiting import until, until_waiting
from support.withdrawing import withhold

BEST = {"block_m": 128, "block_n": 128, "block_k": 128}


def test_search_begins_where_the_search_of_the_nearest_shape_ended(team):
    cold = team.run("cold", size=4096)
    team.run("far", size=16)
    warm = team.run("warm", size=8192)
    alone = team.run("alone", size=8192, url="none")
    elsewhere = team.run("elsewhere", size=4096, device="cuda-sm_80")
    other = team.run("other", size=4096, device="tpu-v5e-2x4")
    assert cold.report["hints"] == alone.report["hints"] == other.report["hints"] == 0
    assert warm.report["hints"] == 16
    assert warm.report["schedule"] == alone.report["schedule"]
    assert warm.report["measured"] < alone.report["measured"] / 2
    assert elsewhere.report["measured"] < cold.report["measured"] / 2


def test_host_waits_for_the_host_that_tunes(team, server, tmp_path):
    first = team.start("first", hang_after=20, until=tmp_path / "go on")
    until(lambda: team.measured("first") == 20)
    second = team.start("second")
    until_waiting(server.url)
    (tmp_path / "go on").touch()
    tuned, waited = first.finish(), second.finish()
    assert waited.report["schedule"] == tuned.report["schedule"]
    assert waited.report["measured"] == 0
    assert waited.stats["waits"] == 1


@pytest.fixture
def until_published(hosts):
    """Return a function that waits until the team's server has a number of schedule artifacts."""
    server = hosts("watcher").server
    query = ArtifactQuery(kind="schedule")
    return lambda count: until(lambda: len(server.list_artifacts(query).artifacts) == count)


def test_host_that_may_not_wait_reuses_published_measurements(team, until_published):
    first = team.start("first", hang_after=20, batch=5)
    until_published(3)
    joined = team.run("joined", wait_seconds=0)
    assert joined.report["was_searched"]
    assert joined.report["known"] == 15
    assert joined.stats["fallbacks"] == {"wait_budget": 1}
    assert not first.ended()


def test_lease_of_a_killed_tuner_is_taken_over_with_its_measurements(team, until_published):
    whole = team.run("whole", namespace="whole", lease_seconds=1)
    killed = team.start("killed", hang_after=31, batch=10, lease_seconds=1)
    until_published(3)
    killed.kill()
    heir = team.run("heir", lease_seconds=1)
    assert heir.report["was_searched"]
    assert heir.report["known"] == 30
    assert heir.report["schedule"] == whole.report["schedule"]
    # Configurations that only the killed host has measured are repeated if they may decide.
    assert heir.report["measured"] < whole.report["measured"] - 15


@pytest.mark.parametrize("earlier", most_extended([0, 70], quick=[0]))
def test_killed_search_of_any_length_loses_only_the_measurement_in_progress(
    team, memories, until_published, earlier
):
    """It hangs in its 31st measurement, so no later measurement publishes the first 30."""
    long, watcher = memories("long"), memories("watcher")
    problem = replace(PROBLEM, shape=(1024,) * 3)
    for number in range(earlier):
        known = record(cost=1.0) | {"configuration": tiles.SPACE.named((1, 1, 2))}
        long.plant("measurements", number, of(known), problem=problem, space=tiles.SPACE)
    killed = team.start("killed", hang_after=31, batch_seconds=0.2, lease_seconds=1)
    until(lambda: team.measured("killed") == 31)
    until(lambda: known_of(watcher, problem, tiles.SPACE) == 30 + bool(earlier))
    killed.kill()
    heir = team.run("heir", lease_seconds=1)
    assert heir.report["known"] == 30 + bool(earlier)


def known_of(host, problem, space):
    """Return the number of configurations that a search on a host would find measured."""
    read = Journal(host.cache, problem, space, host.measure)
    read.read()
    return len(read.known)


def test_a_killed_search_loses_at_most_ten_seconds():
    upload_seconds = 2
    assert journal._BATCH_SECONDS + upload_seconds <= 10


@pytest.mark.extended
def test_all_ranks_of_torch_job_use_schedule_of_one_rank(team, tmp_path):
    ranks = [
        team.start(f"rank-{rank}", seed=rank, noise=3.0, ranks=(rank, 2, tmp_path / "store"))
        for rank in range(2)
    ]
    first, second = (rank.finish().report for rank in ranks)
    assert first["schedule"] == second["schedule"]
    assert sorted([first["measured"] > 0, second["measured"] > 0]) == [False, True]


def test_schedule_that_does_not_work_is_searched_for_again_once(team):
    team.run("first")
    second = team.run("second", reject=1)
    third = team.run("third", reject=1)
    assert second.report["was_searched"]
    assert second.stats["fallbacks"] == third.stats["fallbacks"] == {"rejected": 1}
    assert second.report["schedule"] != BEST
    assert third.report["schedule"] == second.report["schedule"]
    assert not third.report["was_searched"]
    assert third.report["measured"] == 0


def test_host_tunes_alone_if_server_does_not_answer(team):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        impatient = {"first_byte_seconds": 0.2, "drain_seconds": 1}
        first = team.run("host", url=url, **impatient)
        again = team.run("host", url=url, **impatient)
    assert first.report["schedule"] == BEST
    assert set(first.stats["fallbacks"]) <= {"connect", "timeout", "circuit_open"}
    assert first.stats["fallbacks"]
    assert again.report["measured"] == 0  # this host has the answer


SPACE = ParameterSpace({"tile": [8, 16, 32, 64, 128]})
PROBLEM = Problem("matmul", (64, 64), "float32", DeviceType("cuda-sm_90"), "made-up 1.0")
COSTS = {(8,): 5e-3, (16,): 4e-3, (32,): 1e-3, (64,): 2e-3, (128,): 3e-3}


@pytest.fixture
def memories(hosts):
    """Return a function that makes the memory of a host of the team, in this process."""
    with ExitStack() as stack:

        def make(name, *, ranks=None, noise=None, **settings):
            stash = hosts(name, **settings)
            publisher = BoundedExecutor(f"publish-{name}", workers=1, capacity=64)
            stack.callback(publisher.close)
            cache = CompileCache(stash, counters=Counters(), publisher=publisher)
            return Host(cache, TeamMemory(cache, ranks=lambda: ranks), noise)

        yield make


@dataclass
class Host:
    """A host that measures every configuration without a known cost."""

    cache: CompileCache
    memory: TeamMemory
    noise: random.Random | None = None
    measured: list[tuple[int, ...]] = field(default_factory=list)

    def measure(self, configuration):
        self.measured.append(configuration)
        factor = 1 + 9 * self.noise.random() if self.noise else 1
        if (cost := COSTS[configuration]) is None:
            return Finding(configuration, None, failure="compile")
        return Finding(configuration, cost * factor, count=1)

    def tune(self, search):
        self.known = search.known
        for configuration in SPACE:
            if configuration not in search.known:
                search.publish(self.measure(configuration))

    def schedule(self):
        found = self.memory.schedule(PROBLEM, SPACE, self.tune, measure=in_turns(self.measure))
        assert self.cache.publisher.drain(30)
        return found

    @property
    def fallbacks(self):
        return self.cache.counters.snapshot().fallbacks

    def plant(self, role, number, payload, *, problem=None, space=SPACE):
        """Publish a forged payload under a key that other hosts look up."""
        request = (problem or PROBLEM).request(space, role, number, max_bytes=2**30)
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        metadata = request.metadata(compile_seconds=1, raw_size_bytes=len(raw))
        stash = self.cache.stash
        assert stash.put(request.key, raw, metadata)
        if problem is not None:  # other hosts find it by its label
            stash.server.describe([make_description(request.key, request.label, request.parts)])


def record(tile=32, **other):
    outcome = {"cost": 1e-3, "spread": 0.0, "count": 1, "failure": None} | other
    return {"configuration": {"tile": tile}, **outcome}


def of(*records):
    return {"measurements": list(records)}


# test_measuring.py tests all malformed values.
BAD = {
    "no JSON": b"\x80\x04.",
    "deep": b"[" * 200_000,
    "nothing": of(),
    "too many": of(*[record() for _ in range(513)]),
    "not in the space": of(record(tile=4096)),
    "text": of(record(tile="__import__('os').abort()")),
    "another type": of(record(tile=32.0)),
    "no flat value": of(record(tile=[32])),
    "another parameter": of({**record(), "configuration": {"warps": 4}}),
    "infinite": b'{"measurements": ['
    + json.dumps(record(cost=1)).encode()[:-1]
    + b', "cost": Infinity}]}',
    "more digits than a float": of(record(cost=10**400)),
    "neither": of(record(cost=None)),
    "another field": of({**record(), "code": "1"}),
}


@pytest.mark.parametrize("case", ["no JSON", "not in the space", "another type", "neither"])
def test_malformed_answer_is_counted_not_found_and_searched_for_again(memories, case):
    memories("hostile").plant("answer", 0, BAD[case])
    finder, first, second = memories("finder"), memories("first"), memories("second")
    assert finder.memory.find(PROBLEM, SPACE) is None
    assert finder.fallbacks == {"rejected": 1}
    found = first.schedule()
    assert found.configuration == (32,)
    assert found.was_searched
    assert first.fallbacks == {"rejected": 1}
    assert second.schedule().configuration == (32,)
    assert second.measured == []


def test_malformed_measurements_are_counted_and_repeated_here(memories):
    hostile, first = memories("hostile"), memories("first")
    for number, payload in enumerate(BAD.values()):
        hostile.plant("measurements", number, payload)
    hostile.plant("measurements", len(BAD), of(record(tile=128, cost=3e-3)))
    assert first.schedule().configuration == (32,)
    assert set(first.known) == {(128,)}
    assert first.fallbacks == {"corrupt": len(BAD)}


def test_one_job_searches_again_after_the_answer_was_withheld(memories):
    first, second, third = memories("first"), memories("second"), memories("third")
    withhold(first.cache.stash, first.schedule().key)
    assert third.memory.find(PROBLEM, SPACE) is None
    again = second.schedule()
    assert again.was_searched
    found = third.schedule()
    assert (found.configuration, found.key) == (again.configuration, again.key)
    assert third.memory.find(PROBLEM, SPACE).key == again.key
    assert third.measured == []
    assert second.fallbacks == third.fallbacks == {}


def test_oversized_answer_is_not_decompressed(memories):
    hostile, first = memories("hostile"), memories("first")
    large = b" " * (256 * 1024 + 1)
    hostile.plant("answer", 0, large)
    hostile.plant("measurements", 0, large)
    assert first.schedule().configuration == (32,)
    assert first.fallbacks == {"too_large": 2}


def test_false_cost_of_peer_does_not_decide(memories):
    hostile, first = memories("hostile"), memories("first")
    lies = [record(tile=tile, cost=1e-9, count=10**6) for tile in (8, 16)]
    hostile.plant("measurements", 0, of(*lies, record(tile=32, cost=1e3)))
    found = first.schedule()
    assert found.configuration == (32,)  # only the hostile host measured this one as slow
    assert found.best[0].cost == 1e-3
    assert sorted(set(first.measured)) == sorted(COSTS)


@pytest.fixture
def hints(memories):
    """Return a function that returns the first hints of a search next to an answer with records."""

    def begun_at(*records, fit=None):
        hostile, first = memories("hostile"), memories("first")
        hostile.plant("answer", 0, of(*records), problem=replace(PROBLEM, shape=(128, 64)))
        begun = []

        def tune(search):
            begun.extend(search.hints)
            first.tune(search)

        found = first.memory.schedule(
            PROBLEM, SPACE, tune, measure=in_turns(first.measure), fit=fit
        )
        assert first.cache.publisher.drain(30)
        assert found.configuration == (32,)
        assert first.fallbacks == {}
        return begun

    return begun_at


def test_search_starts_only_at_configurations_with_types_of_the_space(hints):
    begun = hints(record(tile=32.0), record(tile=True), record(tile=4096), record(tile=64))
    assert begun == [(64,)]
    assert type(begun[0][0]) is int


def test_configurations_of_one_neighbour_do_not_exhaust_the_budget(hints):
    begun = hints(
        *[record(tile=each) for each in range(1, 400)], fit=lambda values: (values["tile"],)
    )
    assert begun == [(8,)]  # the search examined the first eight records


@pytest.mark.parametrize(
    "fit",
    [
        lambda values: (1024 // (values["tile"] - 64),),
        lambda values: (values["tile"] + 1,),
        lambda _: ([8],),
    ],
)
def test_search_continues_if_values_of_neighbour_do_not_fit(hints, fit):
    assert hints(record(tile=64), fit=fit) == []


@pytest.mark.parametrize(
    ("peer", "measured", "speedup"),
    [
        (None, True, "2.00"),
        (record(tile=32, cost=1), True, "2.00"),  # only costs of this host are compared
        (record(tile=32, cost=None, count=0, failure="crash"), False, None),
        (record(tile=32, cost=1), "raises", None),
    ],
)
def test_answer_is_described_with_its_speedup_over_the_default(
    memories, monkeypatch, peer, measured, speedup
):
    monkeypatch.setitem(COSTS, (8,), COSTS[32,] / 2)
    colleague, first = memories("colleague"), memories("first")
    if peer is not None:
        colleague.plant("measurements", 0, of(peer))
    if measured == "raises":
        monkeypatch.delitem(COSTS, (32,))
    found = first.schedule()
    parts = first.cache.log.description_of(found.key).parts
    assert parts[SCHEDULE_PART] == "tile=8"
    assert parts.get(SPEEDUP_PART) == speedup
    assert ((32,) in first.measured) == bool(measured)
    assert memories("second").schedule().configuration == (8,)


def test_default_measured_last_is_the_answer_if_it_is_the_fastest(memories):
    colleague, first = memories("colleague"), memories("first")
    colleague.plant("measurements", 0, of(record(tile=32, cost=1)))
    found = first.schedule()
    assert first.measured[-1] == found.configuration == (32,)
    assert first.cache.log.description_of(found.key).parts[SPEEDUP_PART] == "1.00"
    assert memories("second").schedule().configuration == (32,)


def test_costs_of_peers_are_accepted_after_local_check(memories):
    colleague, first = memories("colleague"), memories("first")
    records = [record(tile=tile, cost=2 * COSTS[tile,]) for tile in (8, 16, 32, 128)]
    colleague.plant("measurements", 0, of(*records))
    assert first.schedule().configuration == (32,)
    assert set(first.measured) == {(32,), (64,)}


@pytest.mark.parametrize("tiles", [(8, 16, 32, 64, 128), (16, 32, 64, 128)])
def test_failures_of_peers_are_tried_if_nothing_else_works(memories, monkeypatch, tiles):
    broken, first = memories("broken"), memories("first")
    failed = {"cost": None, "count": 0, "failure": "compile"}
    broken.plant("measurements", 0, of(*[record(tile=tile, **failed) for tile in tiles]))
    if 8 not in tiles:
        monkeypatch.setitem(COSTS, (8,), None)
    assert first.schedule().configuration == (32,)
    assert first.measured.count((128,)) == 1


def test_numpy_numbers_are_published(memories):
    first, second = memories("first"), memories("second")
    first.measure = lambda each: Finding((np.int64(each[0]),), COSTS[each], count=1)
    assert first.schedule().configuration == (32,)
    assert second.schedule().configuration == (32,)
    assert second.measured == []


def test_stored_schedule_is_found_without_search_or_wait(memories):
    ranks = MemoryRanks(Values(), 0, 2)
    first, second, ranked = memories("first"), memories("second"), memories("rank", ranks=ranks)
    assert second.memory.find(PROBLEM, SPACE) is None
    assert first.schedule().configuration == (32,)
    found = second.memory.find(PROBLEM, SPACE)
    assert found.configuration == (32,)
    assert not found.was_searched
    assert second.cache.counters.snapshot().misses == 0
    assert ranked.memory.find(PROBLEM, SPACE) is None  # the ranks of a job agree in `schedule`
    second.memory.reject(found, "it does not compile")
    assert second.memory.find(PROBLEM, SPACE) is None


def test_comparison_decides_and_not_a_lucky_cost_of_the_search(monkeypatch):
    monkeypatch.setattr(journal, "_BATCH_SECONDS", 3600)  # there is no cache
    costs = {(8,): 1.05, (16,): 1.0}
    own = Journal(None, PROBLEM, SPACE, in_turns(lambda each: Finding(each, costs[each], count=1)))
    for configuration, lucky in (((8,), 0.9), ((16,), 0.98)):
        own.add(Finding(configuration, lucky, spread=0.2, count=5))
    found = own.find_best({}, confirm=True)
    assert [(each.configuration, each.cost) for each in found] == [((16,), 1.0), ((8,), 1.05)]
    assert own.own()[(8,)].cost == 1.05  # the measurement with the most samples


def test_near_ties_are_measured_again(memories, monkeypatch):
    monkeypatch.setitem(COSTS, (64,), 1.001e-3)
    host = memories("host")
    host.schedule()
    assert host.measured.count((32,)) == host.measured.count((64,)) == 1 + 7  # proves a difference
    assert host.measured.count((8,)) == 1


@pytest.fixture
def remembered(memories):
    """Return a function that returns a second host's known costs after an interrupted search."""

    def known(space, count):
        first, second = memories("first"), memories("second")
        first.measure = lambda configuration: Finding(configuration, 1.0, count=1)
        random_ = random.Random(0)
        drawn = []

        def measure_some(search):
            while len(drawn) < count:
                if (configuration := space.draw(random_)) not in drawn:
                    drawn.append(configuration)
                    search.publish(first.measure(configuration))
                    assert first.cache.publisher.drain(30)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            first.memory.schedule(PROBLEM, space, measure_some, measure=in_turns(first.measure))
        assert first.cache.publisher.drain(30)
        assert first.fallbacks == {}
        known = {}
        second.memory.schedule(
            PROBLEM, space, lambda turn: known.update(turn.known), measure=in_turns(first.measure)
        )
        assert second.cache.publisher.drain(30)
        return len(known)

    return known


NUMBERS = ParameterSpace({"x": list(range(1000))})


def test_all_measurements_of_many_artifacts_are_found(remembered, monkeypatch):
    monkeypatch.setattr(journal, "_LOOKUP_COUNT", 8)
    monkeypatch.setattr(journal, "_BATCH_COUNT", 1)
    assert remembered(NUMBERS, 24) == 24


def test_measurements_are_published_without_a_further_one(memories, monkeypatch):
    monkeypatch.setattr(journal, "_BATCH_SECONDS", 0.1)
    host, watcher = memories("host"), memories("watcher")
    writes = Journal(host.cache, PROBLEM, NUMBERS, host.measure)
    for x in range(3):
        writes.add(Finding((x,), 1.0, count=1))
        until(lambda: known_of(watcher, PROBLEM, NUMBERS) == x + 1)  # noqa: B023 - called now


def test_measurements_that_cannot_be_uploaded_stay_on_this_host(memories, monkeypatch):
    monkeypatch.setattr(journal, "_BATCH_COUNT", 1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    host = memories("host", url=url)
    writes = Journal(host.cache, PROBLEM, NUMBERS, host.measure)
    for x in range(3):
        writes.add(Finding((x,), 1.0, count=1))
    assert host.cache.publisher.drain(30)
    assert known_of(host, PROBLEM, NUMBERS) == 3


def test_measurements_of_peers_are_not_read_without_limit(memories, monkeypatch):
    hostile, host = memories("hostile"), memories("host")
    for number, tile in enumerate((8, 16, 32)):
        hostile.plant("measurements", number, of(record(tile=tile)))
    monkeypatch.setattr(journal, "_MAX_READ_BYTES", len(json.dumps(of(record(tile=8)))) + 1)
    assert known_of(host, PROBLEM, SPACE) == 2


def test_long_measurements_are_split_into_several_artifacts(remembered):
    names = [f"{'parameter' * 10}_{number}" for number in range(100)]
    assert remembered(ParameterSpace({name: [1, 2] for name in names}), 64) == 64


def test_answer_holds_as_many_best_configurations_as_fit(memories):
    first, second = memories("first"), memories("second")
    space = ParameterSpace({f"flags_{number}": ["x" * 400, "y" * 400] for number in range(100)})
    random_ = random.Random(0)
    costs = {space.draw(random_): 1.0 + number for number in range(8)}

    def measure(configuration):
        return Finding(configuration, costs[configuration], count=1)

    def tune(search):
        for configuration in costs:
            search.publish(measure(configuration))

    found = first.memory.schedule(PROBLEM, space, tune, measure=measure)
    assert first.cache.publisher.drain(30)
    stored = second.memory.find(PROBLEM, space)
    assert stored.configuration == found.configuration == min(costs, key=costs.get)
    assert 1 < len(stored.best) < len(found.best) == 8


def test_measurements_of_hosts_are_merged():
    def batch(host, cost, **other):
        counted = {"count": 0 if cost is None else 1} | other
        return [Finding((8,), cost, hosts=frozenset({host}), **counted)]

    one = merge([batch("a", 3.0, spread=0.1), batch("b", 1.0, count=5), batch("c", 2.0)])[8,]
    assert one.cost == 2.0  # each host has one vote, however many samples it took
    assert one.spread == 1.0  # between the hosts
    often = [batch("a", 1.0)] * 5
    assert merge([*often, batch("b", 2.0), batch("c", 2.0)])[8,].cost == 2.0
    assert one.count == 7
    assert one.hosts == {"a", "b", "c"}
    longest = merge([batch("a", MAX_COST), batch("b", MAX_COST, spread=MAX_COST)])[8,]
    assert longest.cost == longest.spread * 2 == MAX_COST
    failed = batch("d", None, failure="compile")
    assert merge([failed, batch("a", 3.0)])[8,].cost == 3.0
    assert merge([failed, failed])[8,].cost is None


def test_all_ranks_get_one_answer_despite_noise(memories):
    values = Values()
    ranks = [
        memories(f"rank-{rank}", ranks=MemoryRanks(values, rank, 4), noise=random.Random(rank))
        for rank in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(Host.schedule, ranks))
    assert len({each.configuration for each in found}) == 1
    assert sorted(bool(rank.measured) for rank in ranks) == [False, False, False, True]
    alone = [memories(f"alone-{n}", url="none", noise=random.Random(n)) for n in range(4)]
    assert len({each.schedule().configuration for each in alone}) > 1  # the noise decides


def test_all_ranks_skip_invalid_answers(memories):
    memories("hostile").plant("answer", 0, b" " * (256 * 1024 + 1))
    memories("hostile-too").plant("answer", 1, of(record(tile=4096)))
    values = Values()
    ranks = [memories(f"rank-{rank}", ranks=MemoryRanks(values, rank, 3)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(Host.schedule, ranks))
    assert [each.configuration for each in found] == 3 * [(32,)]
    assert sorted(bool(rank.measured) for rank in ranks) == [False, False, True]


def test_unsigned_measurements_and_answers_are_not_used(memories, tmp_path):
    keys = Team(tmp_path)
    unsigned = memories("unsigned")
    unsigned.plant("answer", 0, of(record(tile=8)))
    unsigned.plant("measurements", 0, of(record(tile=8)))
    signing = {"signing_key": keys.trust("ci"), "trusted_keys": keys.file}
    strict, other = memories("strict", **signing), memories("other", **signing)
    assert strict.schedule().configuration == (32,)
    assert strict.known == {}
    assert strict.fallbacks == {"unsigned": 2}
    assert other.schedule().configuration == (32,)
    assert other.measured == []
