"""The protocol of sums through aggregators, and its parts, without sockets and clocks."""

import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphstash import ConfigError
from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.aggregator import Aggregator
from graphstash.training.reduce.aggregators.datagrams import (
    END,
    OVERHEAD_BYTES,
    Header,
    Kind,
    Operation,
    Seal,
)
from graphstash.training.reduce.aggregators.elements import (
    ELEMENTS,
    code_of,
    dequantized,
    exponents,
    quantized,
)
from graphstash.training.reduce.aggregators.server import read_secret
from graphstash.training.reduce.aggregators.session import Session, Settings
from support.aggregation_formula import rounds_of, streams_of
from support.lossy_network import Faults, Network

FLOAT32 = code_of("float32")
BLOCK = 16


def gradients(seed, world, elements, densities, dtype=np.float32):
    """Return each rank's tensors, and flags that mark their nonzero blocks."""
    random_ = np.random.default_rng(seed)
    tensors, flags = [], []
    for density in densities:
        values = (random_.standard_normal(elements) * 100).astype(dtype)
        keep = random_.random(-(-elements // BLOCK)) < density
        values[~np.repeat(keep, BLOCK)[:elements]] = 0
        tensors.append(values)
        flags.append(
            np.array(
                [part.any() for part in np.split(values, range(BLOCK, elements, BLOCK))][
                    : len(keep)
                ],
                bool,
            )
        )
    return tensors, flags


def in_order(tensors):
    """Return the sum in rank order, which the protocol promises."""
    total = np.zeros_like(tensors[0])
    for each in tensors:
        total += each
    return total


def lossy_run(seed):
    """Sum tensors under random faults, and return the number of repeated datagrams."""
    chance = random.Random(seed)
    world, aggregators = chance.choice([1, 2, 3, 5]), chance.choice([1, 2, 3])
    faults = Faults(
        *(chance.choice([0, 0.02, 0.2]) for _ in range(2)), 0.01, chance.choice([0, 0.1])
    )
    network = Network(seed, world=world, aggregators=aggregators, faults=faults)
    for number in range(3):
        elements = chance.choice([0, 1, BLOCK, BLOCK + 1, 1000, 3000])
        densities = [chance.choice([0, 0.1, 0.5, 1]) for _ in range(world)]
        tensors, flags = gradients(seed * 10 + number, world, elements, densities)
        expected = in_order(tensors)
        starts = [chance.choice([0, 0, 3]) * chance.random() for _ in range(world)]
        network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32, starts=starts)
        for found in tensors:
            np.testing.assert_array_equal(found, expected)
    return network.resent


def test_sums_are_exact_under_any_network_fault(is_extended):
    seeds = range(200 if is_extended else 40)
    assert sum(lossy_run(seed) for seed in seeds) > len(seeds)


@pytest.mark.parametrize(
    ("densities", "elements", "aggregators"),
    [
        *(([1, 1, 1], 0, 1), ([1, 1, 1], 5000, 2)),
        *(([0, 0, 0], 1, 2), ([0, 0, 0], 5000, 1)),
        *(([0.1, 0.3, 0], 1, 1), ([0.1, 0.3, 0], 5000, 2)),
        *(([1, 0.02, 0.02], 0, 2), ([1, 0.02, 0.02], 5000, 1)),
    ],
)
def test_bytes_without_loss_are_those_of_the_formula(densities, elements, aggregators):
    payload_bytes, slots = 400, 4
    network = Network(3, world=3, aggregators=aggregators, slots=slots, payload_bytes=payload_bytes)
    tensors, flags = gradients(1, 3, elements, densities)
    totals = network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
    capacity = (payload_bytes - OVERHEAD_BYTES) // (BLOCK * 4 + 4)
    streams = streams_of(-(-elements // BLOCK), capacity, aggregators * slots)
    rounds = rounds_of([each.nonzero()[0].tolist() for each in flags], capacity, streams)
    union = int(np.logical_or.reduce(flags).sum())
    for rank in range(3):
        assert totals[rank] == (union, rounds)
        own = int(flags[rank].sum())
        assert network.sent_bytes[rank] == 72 * rounds + own * (BLOCK * 4 + 4)
        assert network.received_bytes[rank] == 72 * rounds + union * (BLOCK * 4 + 4)
    assert network.resent == 0


def test_timeout_adapts_to_slow_link_without_doubling_traffic():
    network = Network(0, world=3, aggregators=2, faults=Faults(delay=0.15))
    resent = []
    for number in range(4):
        tensors, flags = gradients(number, 3, 3000, [1, 1, 1])
        before = network.resent
        network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
        resent.append(network.resent - before)
    rounds = network.workers[0].totals().rounds
    assert resent[0] > 0
    assert sum(resent[1:]) < 0.1 * 3 * 3 * rounds


def test_hundred_workers_are_distinguished():
    network = Network(0, world=100, aggregators=3, faults=Faults(0.05, 0.05, 0.01))
    tensors, flags = gradients(1, 100, 100, [0.5] * 100)
    expected = in_order(tensors)
    network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
    assert {each.tobytes() for each in tensors} == {expected.tobytes()}


@pytest.mark.parametrize("name", [each.name for each in ELEMENTS.values()])
def test_every_type_is_added_up_as_torch_would(name):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    given_ = [(torch.randn(1000, generator=generator) * 90).to(dtype) for _ in range(3)]
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    expected = torch.zeros(1000, dtype=wide)
    for each in given_:
        expected += each.to(wide)
    element = code_of(name)
    arrays = [
        each.view(torch.int16 if name == "bfloat16" else dtype).numpy().view(ELEMENTS[element].wire)
        for each in given_
    ]
    flags = [np.ones(63, bool)] * 3
    Network(0, world=3, aggregators=2).sum(arrays, flags, block_size=BLOCK, element=element)
    for each in given_:
        assert torch.equal(each, expected.to(dtype))


def test_maximum_over_ranks_is_found():
    tensors = [np.array([1, 200, 3, 0], np.uint8), np.array([5, 2, 3, 0], np.uint8)]
    Network(0, world=2, aggregators=1).sum(
        tensors,
        [np.ones(2, bool)] * 2,
        block_size=2,
        element=code_of("uint8"),
        operation=Operation.MAX,
    )
    assert tensors[0].tolist() == tensors[1].tolist() == [5, 200, 3, 0]


def hostile(datagram, chance):
    """Return datagrams that an attacker without the key can make of this one."""
    changed = bytearray(datagram)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return [
        changed,
        datagram[: chance.randrange(len(datagram))],
        datagram + b"more",
        chance.randbytes(chance.randrange(2000)),
        datagram[:16] + chance.randbytes(len(datagram) - 16),
    ]


def test_forged_cut_and_random_datagrams_change_nothing():
    chance = random.Random(0)
    network = Network(0, world=3, aggregators=2, faults=Faults(0.05, 0.05, 0.01))
    said = 0

    def attack(to, rank, aggregator, datagram):
        nonlocal said
        for forged in hostile(datagram, chance):
            if bytes(forged) != datagram:
                said += 1
                assert network.seals[aggregator].open(bytes(forged)) is None
                network.deliver(to, rank, aggregator, forged)

    network.tap = attack
    tensors, flags = gradients(1, 3, 3000, [0.5, 1, 0.1])
    expected = in_order(tensors)
    network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
    assert {each.tobytes() for each in tensors} == {expected.tobytes()}
    assert said > 500


@pytest.mark.parametrize("has_one_key", [True, False])
def test_repeated_datagrams_change_nothing_wherever_they_are_sent(has_one_key):
    """An attacker replays every datagram later, to any receiver, from any address."""
    chance = random.Random(0)
    faults = Faults(0.05, 0.05, 0.01)
    network = Network(0, world=3, aggregators=2, faults=faults, has_one_key=has_one_key)
    heard = []

    def attack(to, rank, aggregator, datagram):
        heard.append(datagram)
        for _ in range(3):
            old = chance.choice(heard)
            network.deliver(
                chance.choice(["worker", "aggregator"]),
                chance.randrange(3),
                chance.randrange(2),
                old,
            )

    network.tap = attack
    for number in range(3):
        tensors, flags = gradients(number, 3, 3000, [0.5, 1, 0.1])
        expected = in_order(tensors)
        network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
        assert {each.tobytes() for each in tensors} == {expected.tobytes()}
    assert all(aggregator.failure is None for aggregator in network.aggregators)


def test_datagram_of_rank_from_another_address_is_ignored():
    network = Network(0, world=2, aggregators=1)
    (aggregator,), (seal,) = network.aggregators, network.seals
    for kind in (Kind.OPEN, Kind.LEAVE, Kind.DATA, Kind.ALIVE):
        message = seal.open(seal.close(Header(kind, rank=1, filled=2)))
        assert aggregator.receive(message, "elsewhere", 0) == []
    assert not aggregator.has_left(1)


def ended(network, densities=(0.5, 1, 0.1), elements=3000, **more):
    """Return the error of each rank whose sum fails, by rank."""
    tensors, flags = gradients(1, len(network.workers), elements, densities)
    network.sum(tensors, flags, **{"block_size": BLOCK, "element": FLOAT32} | more)
    return {rank: str(error) for rank, error in network.failures.items()}


def bounded(**more):
    return Network(
        *(0,), world=3, aggregators=2, lost_after_seconds=30, timeout_seconds=600, **more
    )


def test_rank_that_dies_before_or_during_a_sum_is_named_to_all_other_ranks():
    network = bounded()
    network.dead.add(2)
    assert ended(network) == dict.fromkeys([0, 1], "nothing was heard of rank 2 for 30 seconds")
    assert 30 < network.now < 35

    network = bounded(faults=Faults(0.1, 0.1, 0.01))

    def kill(*_):
        if network.now > 0.05:
            network.dead.add(1)

    network.tap = kill
    assert ended(network) == dict.fromkeys([0, 2], "nothing was heard of rank 1 for 30 seconds")


def closes_early(network):
    header = Header(Kind.LEAVE, rank=1)
    network.deliver("aggregator", 1, 0, network.seals[0].close(header))
    network.dead.add(1)


def starts_anew(network):
    tensors, flags = gradients(1, 3, 3000, [1, 1, 1])
    network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
    network.start_anew(1)


@pytest.mark.parametrize(
    ("fault", "starts", "ranks", "text"),
    [
        (lambda n: n.dead_aggregators.add(1), None, [0, 1, 2], "aggregator 1 has not answered"),
        (lambda n: None, [0, 5000, 0], [0, 1, 2], "still waits for rank 1 after 600 seconds"),
        (closes_early, None, [0, 2], "rank 1 closed before the others were done"),
        (starts_anew, None, [0, 1, 2], "is ahead of aggregator 1, which was restarted"),
    ],
    ids=["dead aggregator", "late rank", "closing rank", "restarted aggregator"],
)
def test_unfinishable_sum_reports_its_cause_on_every_rank(fault, starts, ranks, text):
    network = bounded()
    fault(network)
    messages = ended(network, **({} if starts is None else {"starts": starts}))
    assert sorted(messages) == ranks
    assert all(text in each for each in messages.values())
    assert starts or network.now < 35


def test_ranks_wait_for_late_but_live_rank():
    network = bounded(faults=Faults(0.1, 0, 0.01))
    tensors, flags = gradients(1, 3, 3000, [1, 1, 1])
    expected = in_order(tensors)
    starts = [0, 0, 500]
    network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32, starts=starts)
    assert not network.failures
    assert {each.tobytes() for each in tensors} == {expected.tobytes()}
    # Each other rank requests every slot once a second, without its blocks.
    assert network.resent_bytes < 2 * 500 * 6 * 72 * 1.3


@pytest.mark.parametrize("bound", [{"elements": [3000, 3001, 3000]}, {"block_size": [16, 16, 8]}])
def test_ranks_with_different_tensors_all_get_both_descriptions(bound):
    network = bounded()
    elements = bound.get("elements", [3000] * 3)
    sizes = bound.get("block_size", [16] * 3)
    tensors = [np.ones(each, np.float32) for each in elements]
    flags = [np.ones(-(-n // size), bool) for n, size in zip(elements, sizes, strict=True)]
    network.sum(tensors, flags, block_size=sizes, element=FLOAT32)
    assert sorted(network.failures) == [0, 1, 2]
    for error in network.failures.values():
        assert isinstance(error, ConfigError)
        text = str(error)
        assert "of 3000 float32 in blocks of 16" in text
        assert "of 3001 float32" in text or "float32 in blocks of 8" in text


@pytest.mark.parametrize(
    ("numbers", "next_"),
    [([0, 1], 0), ([0, 1], 1), ([1, 0], 2), ([0, 0], 2), ([8, 9], END), ([0, 1], 9)],
    ids=["back", "among its own", "descending", "twice", "behind the tensor", "next behind it"],
)
def test_blocks_that_are_out_of_order_end_the_session(numbers, next_):
    network = bounded()
    header = Header(
        *(Kind.DATA, FLOAT32, Operation.SUM),
        streams=1,
        capacity=4,
        filled=2,
        elements=9 * BLOCK,
        block_size=BLOCK,
        next=next_,
    )
    network.deliver(
        "aggregator", 0, 0, network.seals[0].close_blocks(header, np.uint32(numbers), np.copy)
    )
    assert network.aggregators[0].failure == "rank 0 has sent what aggregator 0 cannot read"


def test_rank_cannot_send_endless_rounds_or_accumulate_blocks():
    seal = Seal(b"k" * 32, 1)
    fields = {"capacity": 4, "elements": 9 * BLOCK, "block_size": BLOCK, "streams": 1}
    for second in ([], [0], [4]):
        aggregator = Aggregator(seal, number=0, world=2, now=0, lost_after_seconds=1)
        for rank in range(2):
            header = Header(Kind.OPEN, rank=rank, filled=2)
            aggregator.receive(seal.open(seal.close(header)), rank, 0)
        rounds = [([3], 5, [0], 2), (second, 5, [], 2)]
        for number, (his, his_next, ours, our_next) in enumerate(rounds):
            assert aggregator.failure is None
            for rank, blocks, next_ in ((0, his, his_next), (1, ours, our_next)):
                header = Header(
                    *(Kind.DATA, FLOAT32, Operation.SUM),
                    **fields | {"rank": rank, "round": number, "filled": len(blocks)},
                    next=next_,
                )
                datagram = seal.close_blocks(header, np.array(blocks, np.uint32), np.copy)
                aggregator.receive(seal.open(datagram), rank, 0)
        text = "rank 0" if second else "rank 1"
        assert aggregator.failure == f"{text} has sent what aggregator 0 cannot read"


@pytest.mark.parametrize("repeated", [Kind.ALIVE, Kind.OPEN], ids=lambda kind: kind.name)
def test_replayed_heartbeats_do_not_keep_a_rank_alive(repeated):
    network = bounded()
    (aggregator, _), (seal, _) = network.aggregators, network.seals
    alive = seal.open(seal.close(Header(Kind.ALIVE, rank=0, round=1)))
    again = seal.open(seal.close(Header(repeated, rank=0, round=1, filled=3)))
    aggregator.receive(alive, 0, 0)
    for now in range(60):
        aggregator.receive(again, 0, now)
        for rank in (1, 2):
            header = Header(Kind.ALIVE, rank=rank, round=now + 1)
            aggregator.receive(seal.open(seal.close(header)), rank, now)
        aggregator.tick(now)
    assert aggregator.failure == "nothing was heard of rank 0 for 30 seconds"


def test_blocks_keep_a_rank_alive():
    """Every ALIVE datagram may be lost, for example if an attacker floods an aggregator."""
    network = bounded()
    sent = network.deliver

    def deliver(to, rank, aggregator, datagram):
        message = network.seals[aggregator].open(datagram)
        if message.header.kind != Kind.ALIVE:
            sent(to, rank, aggregator, datagram)

    network.deliver = deliver
    for _ in range(4):
        tensors, flags = gradients(1, 3, 3000, [1, 1, 1])
        network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32, starts=[10, 10, 10])
    assert network.now > 40
    assert not network.failures


def test_resumed_process_declares_no_peer_dead():
    times = iter([100, 101, 103, 3700, 3701, 3701])
    clock = sockets.AwakeClock(lambda: next(times))
    assert [clock() for _ in range(5)] == [101, 103, 105, 106, 106]


def test_counter_of_tensors_wraps_around():
    network = bounded()
    for worker in network.workers:
        worker._tensors = 2**32 - 1
    for _ in range(2):
        tensors, flags = gradients(1, 3, 3000, [1, 1, 1])
        expected = in_order(tensors)
        network.sum(tensors, flags, block_size=BLOCK, element=FLOAT32)
        np.testing.assert_array_equal(tensors[0], expected)


def test_bf16_is_widened_and_rounded_as_by_torch():
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    brain = ELEMENTS[code_of("bfloat16")]
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    ours = torch.from_numpy(brain.widen(bits))
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    some = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    rounded = torch.from_numpy(brain.narrow(some).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(some).to(torch.bfloat16)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)


@given(
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_quantized_integers_stay_within_error_bound(world, seed, size, blocks):
    random_ = np.random.default_rng(seed)
    parts = [
        (
            random_.standard_normal((blocks, 8))
            * size
            * 10.0 ** random_.integers(-3, 4, (blocks, 1))
        ).astype(np.float32)
        for _ in range(world)
    ]
    codes = np.max([exponents(part) for part in parts], axis=0)
    sums = sum(quantized(part, codes, world).astype(np.int64) for part in parts)
    assert np.abs(sums).max() < 2**31
    found = dequantized(sums.astype(np.int32), codes, world).astype(np.float64)
    exact = np.sum(np.array(parts, np.float64), axis=0)
    k = 30 - math.ceil(math.log2(world))
    step = np.ldexp(1.0, codes.astype(int) - 126 - k)[:, None]
    last_place = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - exact) <= world / 2 * step + last_place / 2 * 1.001).all()


def test_non_finite_block_becomes_nan():
    rows = np.ones((3, 4), np.float32)
    rows[0, 1], rows[2, 3] = math.inf, math.nan
    codes = exponents(rows)
    found = dequantized(quantized(rows, codes, 2), codes, 2)
    assert np.isnan(found[[0, 2]]).all()
    assert (found[1] == 1).all()
    assert exponents(np.zeros((1, 4), np.float32)).tolist() == [0]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[fd00::1]:0", ("fd00::1", 0)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_address_has_host_and_port(text, address):
    assert sockets.parsed(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "fd00::1:80", "host:65536", "h:-1"])
def test_malformed_address_is_refused(text):
    with pytest.raises(ConfigError, match="is not an address: write HOST:PORT"):
        sockets.parsed(text)


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 cannot be listened on"):
        sockets.bound(("192.0.2.1", 0))


def test_secret_has_32_bytes_that_only_its_owner_reads_and_is_not_sent(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(path)
    path.write_text("x" * 31 + "\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has 31 bytes without white space at its ends: take 32"):
        read_secret(path)
    path.write_text("x" * 32 + "\n")
    assert read_secret(path) == b"x" * 32
    settings = Settings(
        256, ("a:1",), quantize=False, payload_bytes=None, slots=None, lost_after_seconds=30
    )
    offer = object.__new__(Session)._offer(settings, 0, path, None)
    assert not offer.problem
    assert b"x" * 32 not in pickle.dumps(offer)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=rf"may use it \(mode 604\): chmod 600 {path}"):
        read_secret(path)
