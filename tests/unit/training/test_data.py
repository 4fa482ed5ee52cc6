# ruff: noqa: NPY002 - users draw from the global generator of NumPy
"""Batches, data positions and random states: a resumed run continues at the same position."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data

from graphstash import GraphstashError
from graphstash.training.data.batches import Batches
from graphstash.training.data.position import (
    DataPosition,
    host_random_state,
    random_state,
    set_random_state,
)

shapes = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 30),
        "batch_size": st.integers(1, 9),
        "world": st.integers(1, 4),
        "seed": st.integers(0, 2**40),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
).filter(lambda s: not s["drop_last"] or s["samples"] >= s["batch_size"] * s["world"])


def batches_of(samples, **options):
    return Batches(torch.arange(samples), **options)


def some(batches, count):
    return [batch.tolist() for batch in itertools.islice(batches, count)]


@given(shapes, st.integers(0, 40), st.integers(0, 3))
def test_batches_resume_at_their_position(shape, stop, rank):
    rank %= shape["world"]
    batches = batches_of(**shape, rank=rank)
    some(batches, stop)
    state = batches.state_dict()
    again = batches_of(**shape | {"seed": 0}, rank=rank)
    some(again, 3)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert some(again, 20) == some(batches, 20)


@given(shapes)
def test_an_epoch_has_every_sample_but_those_dropped_at_its_end(shape):
    ranks = [batches_of(**shape, rank=rank) for rank in range(shape["world"])]
    for _ in range(3):
        epoch = [some(batches, len(batches)) for batches in ranks]
        sizes = [[len(batch) for batch in batches] for batches in epoch]
        assert sizes.count(sizes[0]) == len(sizes)
        seen = Counter(itertools.chain(*itertools.chain(*epoch)))
        if shape["drop_last"]:
            assert set(seen.values()) == {1}
            assert len(seen) == len(ranks[0]) * shape["batch_size"] * shape["world"]
        else:
            assert set(seen) == set(range(shape["samples"]))
            assert seen.total() - shape["samples"] < shape["world"]


@given(shapes.filter(lambda shape: shape["drop_last"]))
def test_processes_share_batches_of_single_process(shape):
    world = shape.pop("world")
    ranks = [batches_of(**shape, rank=rank, world=world) for rank in range(world)]
    one = batches_of(**shape | {"batch_size": shape["batch_size"] * world})
    parts = [some(batches, 12) for batches in ranks]
    assert [list(itertools.chain(*batch)) for batch in zip(*parts, strict=True)] == some(one, 12)


def test_order_differs_between_epochs_and_seeds():
    orders = [
        tuple(some(batches, 1)[0])
        for seed in range(10)
        for batches in itertools.repeat(batches_of(100, batch_size=100, seed=seed), 10)
    ]
    assert len(set(orders)) == 100


def test_without_shuffling_the_order_is_the_datasets():
    batches = batches_of(5, batch_size=2, shuffle=False, drop_last=False)
    assert some(batches, 6) == [[0, 1], [2, 3], [4]] * 2
    assert batches.epoch == 1


def test_the_global_generators_stay_as_they_are():
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    some(batches_of(10, batch_size=3), 20)
    assert torch.equal(torch.rand(1), first)


class Squares(data.Dataset):
    fail = False

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if self.fail:
            raise OSError("the disk is away")
        return {"x": index, "y": float(index**2)}


class Many(Squares):
    def __getitems__(self, indices):
        return [super(Many, self).__getitem__(index) for index in indices[::-1]]


def test_samples_of_a_dataset_are_collated_as_a_data_loader_does():
    batch = next(Batches(Squares(), 3, shuffle=False))
    assert torch.equal(batch["x"], torch.tensor([0, 1, 2]))
    assert torch.equal(batch["y"], torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64))
    assert torch.equal(next(Batches(Many(), 3, shuffle=False))["x"], torch.tensor([2, 1, 0]))
    assert next(Batches(Squares(), 2, shuffle=False, collate=len)) == 2


def test_tensors_are_cut_in_the_same_way():
    images, labels = torch.randn(10, 2), torch.arange(10)
    x, y = next(Batches((images, labels), 4))
    assert torch.equal(x, images[y])


def test_failed_batch_does_not_advance_position():
    dataset = Squares()
    batches = Batches(dataset, 5, shuffle=False)
    next(batches)
    state = batches.state_dict()
    dataset.fail = True
    with pytest.raises(OSError, match="away"):
        next(batches)
    assert batches.state_dict() == state
    dataset.fail = False
    assert next(batches)["x"].tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be at least 1 \(got 0\)"),
        ({"batch_size": 11}, "10 samples do not fill a batch of 11; .* drop_last=False"),
        ({"batch_size": 5, "world": 3}, "10 samples do not fill a batch of 15"),
        ({"batch_size": 1, "rank": 2, "world": 2}, r"rank must be from 0 to 1 \(got 2\)"),
        ({"data": [], "batch_size": 1, "drop_last": False}, "0 samples do not fill a batch of 1"),
        ({"data": iter([]), "batch_size": 1}, "has no length or no items; give tensors or"),
        ({"data": (torch.zeros(2), torch.zeros(3)), "batch_size": 1}, r"have \[2, 3\] samples"),
    ],
)
def test_arguments_without_batches_are_refused(arguments, message):
    with pytest.raises(GraphstashError, match=message):
        Batches(**{"data": torch.arange(10)} | arguments)


@pytest.mark.parametrize(
    ("name", "other"),
    [("samples", 11), ("batch_size", 3), ("shuffle", False), ("drop_last", False)],
)
def test_position_of_other_batches_is_refused(name, other):
    shape = {"samples": 10, "batch_size": 2, "shuffle": True, "drop_last": True}
    state = batches_of(**shape).state_dict()
    with pytest.raises(GraphstashError, match=r"was .* saved and is .* now"):
        batches_of(**shape | {name: other}).load_state_dict(state)


def test_other_number_of_processes_gets_same_global_batches():
    one = batches_of(12, batch_size=4)
    some(one, 4)
    two = [batches_of(12, batch_size=2, rank=rank, world=2) for rank in range(2)]
    for batches in two:
        batches.load_state_dict(one.state_dict())
    parts = [some(batches, 1)[0] for batches in two]
    assert parts[0] + parts[1] == some(one, 1)[0]


class Noisy(data.Dataset):
    """Draw from every global generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index + torch.rand(1).item() / 4 + random.random() / 4 + np.random.rand() / 4


class Own(data.Dataset):
    """Draw from generators of its own: in an attribute, in another object, and in a closure."""

    def __init__(self):
        self.rng = random.Random(1)
        self.generator = torch.Generator().manual_seed(2)
        self.transforms = [Jitter(), closing_over(seeded())]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        drawn = torch.rand(1, generator=self.generator).item() + self.rng.random()
        return index + (drawn + sum(each() for each in self.transforms)) / 8


class Jitter:
    def __init__(self):
        self.old, self.new = np.random.RandomState(4), np.random.default_rng(5)

    def __call__(self):
        return self.old.rand() + self.new.random()


def closing_over(generator):
    return lambda: torch.rand(1, generator=generator).item()


class Buffered(data.IterableDataset):
    """Shuffle in a buffer, with a function that draws a number below another."""

    def __init__(self, below):
        self.below = below

    def __iter__(self):
        buffer = []
        for number in range(40):
            buffer.append(number)
            if len(buffer) > 5:
                yield buffer.pop(self.below(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class Endless(data.Sampler):
    """Give random orders of the samples one after another, drawn when they are needed."""

    def __init__(self, generator=None):
        self.generator = generator

    def __iter__(self):
        while True:
            yield from torch.randperm(10, generator=self.generator).tolist()


def by_torch():
    return Buffered(lambda below: int(torch.randint(below, ())))


class FilesInRandomOrder(data.IterableDataset):
    def __iter__(self):
        files = list(range(10))
        random.shuffle(files)
        torch.rand(1)
        yield from files


class Stream(data.IterableDataset):
    def __iter__(self):
        return (i + torch.rand(1).item() for i in range(10))


class Crops:
    """Draw each batch on request, without end."""

    def __iter__(self):
        while True:
            yield torch.randint(1000, (4,))


class OwnState:
    """A source with its own state, which behaves as torchdata's StatefulDataLoader.

    It draws from the generator when an epoch begins. It ends an epoch only after a request for one
    more batch. Its position may be the end of an epoch.
    """

    def __init__(self):
        self.given = 0
        self.start = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.start = state_dict["given"]

    def __iter__(self):
        torch.rand(1)
        start, self.start = self.start, 0
        return self.batches(start)

    def batches(self, start):
        for self.given in range(start + 1, 5):
            yield torch.rand(1) + self.given


def seeded():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "in order": lambda: data.DataLoader(Noisy(), 3),
    "shuffled": lambda: data.DataLoader(Noisy(), 3, shuffle=True, drop_last=True),
    "own generator": lambda: data.DataLoader(Noisy(), 3, shuffle=True, generator=seeded()),
    "weighted": lambda: data.DataLoader(
        Noisy(), 3, sampler=data.WeightedRandomSampler([1.0] * 10, 10, generator=seeded())
    ),
    "batch sampler": lambda: data.DataLoader(
        Noisy(),
        batch_sampler=data.BatchSampler(
            data.RandomSampler(Noisy(), generator=seeded()), 3, drop_last=False
        ),
    ),
    "distributed": lambda: data.DataLoader(
        Noisy(), 3, sampler=data.DistributedSampler(Noisy(), num_replicas=2, rank=1)
    ),
    "generators of the dataset": lambda: data.DataLoader(Own(), 3, shuffle=True),
    "generators of batches": lambda: Batches(Own(), 3),
    "endless sampler": lambda: data.DataLoader(Noisy(), 3, sampler=Endless(seeded())),
    "files": lambda: data.DataLoader(FilesInRandomOrder(), 3),
    "own buffer": lambda: data.DataLoader(Buffered(random.Random(6).randrange), 3),
    "stream": lambda: data.DataLoader(Stream(), 3),
    "endless": Crops,
    "list": lambda: [torch.tensor([i]) for i in range(4)],
    "own state": OwnState,
    "batches": lambda: Batches(Noisy(), 3),
}


def persistent(dataset):
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}
    return data.DataLoader(dataset, 3, shuffle=True, **options)


WITH_WORKERS = {
    "workers": lambda: data.DataLoader(Noisy(), 3, shuffle=True, num_workers=2),
    "persistent workers": lambda: persistent(torch.arange(10)),
}


def run(position, count, between):
    """Return batches. Between two batches, a model draws random numbers as dropout does."""
    batches = []
    for batch in itertools.islice(position, count):
        batches.append(batch.tolist())
        torch.rand(between)
    return batches


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def check_going_on(make, directory, stop, between):
    seed(1)
    position = DataPosition(make())
    run(position, stop, between)
    path = directory / "state.pt"
    torch.save({"data": position.state_dict(), "random": host_random_state()}, path)
    expected = run(position, 9, between)
    position.state_dict()
    position.close()
    seed(2)
    state = torch.load(path, weights_only=True)
    position = DataPosition(make())
    position.load_state_dict(state["data"])
    set_random_state(state["random"])
    assert position.state_dict()["batch"] == state["data"]["batch"]
    assert run(position, 9, between) == expected
    position.state_dict()
    position.close()


@pytest.mark.parametrize("name", LOADERS)
def test_any_data_resumes_at_its_position(name, tmp_path, caplog):
    """The position is at the start, in the middle or at the end of the first epochs."""
    for stop in range(8):
        check_going_on(LOADERS[name], tmp_path, stop, between=stop % 3)
    # Only the draws of these could have been kept, as far as a position can tell.
    assert ("resumes" in caplog.text) == (name in {"stream", "endless"})


@pytest.mark.parametrize(
    ("name", "stop"), [("workers", 2), ("persistent workers", 4), ("persistent workers", 6)]
)
def test_data_of_worker_processes_resumes_at_its_position(name, tmp_path, stop, caplog):
    check_going_on(WITH_WORKERS[name], tmp_path, stop, 1)
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (
            lambda: data.DataLoader(by_torch(), 3),
            "draw in turn from the global generator of torch",
        ),
        (
            lambda: data.DataLoader(Noisy(), 4, sampler=Endless()),
            "draw in turn from the global generator of torch",
        ),
        (
            lambda: persistent(Noisy()),
            "persistent workers draw random numbers",
        ),
        (
            lambda: persistent(Own()),
            "persistent workers draw random numbers",
        ),
    ],
)
def test_draws_that_cannot_be_repeated_are_reported_on_saving_and_resuming(make, cause, caplog):
    seed(1)
    position = DataPosition(make())
    run(position, 6, between=1)
    state, generators = position.state_dict(), host_random_state()
    again = DataPosition(make())
    again.load_state_dict(state)
    assert [cause in message for message in caplog.messages] == [True, True]
    set_random_state(generators)
    resumed = run(again, 6, between=1)
    set_random_state(generators)
    assert run(position, 6, between=1) != resumed
    position.close()
    again.close()


def test_a_buffer_whose_generator_no_other_code_uses_resumes_without_a_warning(tmp_path, caplog):
    for stop in range(1, 6):
        check_going_on(lambda: data.DataLoader(by_torch(), 3), tmp_path, stop, between=0)
    assert not caplog.records


def test_a_generator_that_a_resumed_run_lacks_is_reported(caplog):
    dataset = Squares()
    position = DataPosition(Batches(dataset, 2))
    dataset.late = random.Random(1)
    state = position.state_dict()
    DataPosition(Batches(Squares(), 2)).load_state_dict(state)
    assert "generator '_source.late (Random 1)'" in caplog.text


@pytest.mark.parametrize("name", ["shuffled", "own generator", "batch sampler", "stream"])
def test_the_batches_are_those_of_a_plain_loop(name):
    seed(3)
    loader = LOADERS[name]()
    plain = [batch.tolist() for _ in range(3) for batch in loader]
    seed(3)
    assert run(DataPosition(LOADERS[name]()), len(plain), 0) == plain


def test_samplers_get_the_epoch():
    epochs = []

    class Sampler(data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    def loader():
        return data.DataLoader(range(4), 2, sampler=Sampler(range(4)))

    position = DataPosition(loader())
    run(position, 5, 0)
    assert epochs == [0, 1, 2]
    again = DataPosition(loader())
    again.load_state_dict(position.state_dict())
    assert epochs[3:] == [2]
    run(again, 2, 0)
    assert epochs[3:] == [2, 3]


def test_an_epoch_without_a_batch_is_an_error():
    with pytest.raises(GraphstashError, match="epoch 0 of the data, a list, has no batch"):
        next(DataPosition([]))


def test_one_shot_data_is_used_once_and_reports_its_end():
    position = DataPosition(iter([torch.tensor(1), torch.tensor(2)]))
    assert [next(position).item() for _ in range(2)] == [1, 2]
    with pytest.raises(
        GraphstashError, match=r"a list_iterator, ended before the training.* fewer"
    ):
        next(position)


def test_one_shot_data_has_no_position():
    with pytest.raises(GraphstashError, match=r"a generator, .* only once.* without checkpoints"):
        DataPosition(i for i in range(9)).state_dict()


def test_position_of_other_data_is_refused():
    position = DataPosition([1, 2, 3])
    for _ in range(3):
        next(position)
    with pytest.raises(GraphstashError, match=r"had 3 batches or more .* and has 2 now"):
        DataPosition([1, 2]).load_state_dict(position.state_dict())
    with pytest.raises(GraphstashError, match="does not fit Batches: give the data"):
        DataPosition(Batches([1, 2], 1)).load_state_dict(position.state_dict())


def test_closing_ends_a_generator():
    ended = []

    class Source:
        def __iter__(self):
            try:
                yield from range(9)
            finally:
                ended.append(True)

    position = DataPosition(Source())
    next(position)
    position.close()
    assert ended


# Random states.


def draw():
    """Draw from every generator, and from both distributions that store a second number."""
    return [
        *(random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()),
        *(torch.rand(3).tolist(), torch.randn(1).tolist()),
    ]


@pytest.mark.parametrize("before", range(2))
@pytest.mark.parametrize("take", [host_random_state, lambda: random_state("cpu")])
def test_restored_state_repeats_the_numbers_and_taking_it_draws_none(before, take):
    for _ in range(before):
        draw()
    state = take()
    first = [draw(), draw()]
    set_random_state(state)
    take()
    assert [draw(), draw()] == first
    set_random_state(state | {"torch_xla": 5}, "cpu")  # the state of another device is skipped
    assert draw() == first[0]


def test_numpy_may_use_another_bit_generator(tmp_path):
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        torch.save(host_random_state(), tmp_path / "state.pt")
        first = draw()
        set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
        assert draw() == first
    finally:
        np.random.set_bit_generator(mine)
