import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from graphstash import GraphstashError
from graphstash.training.data.device_loader import DeviceLoader, InlineLoader, to_device

SECONDS = 60


class Thing:
    """An object that supports weak references."""


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch-")]


def test_batches_are_uploaded_in_order_and_no_thread_is_left():
    assert list(DeviceLoader(range(100))) == list(range(100))
    assert list(DeviceLoader(range(100), upload=lambda batch: batch * 2)) == list(range(0, 200, 2))
    assert list(DeviceLoader([])) == []
    assert not threads()


def test_batches_are_uploaded_on_the_stream_of_the_consumer(monkeypatch):
    """Stand-ins replace CUDA, which this machine lacks."""
    streams = threading.local()

    @contextmanager
    def stream(chosen):
        before, streams.current = getattr(streams, "current", "default"), chosen
        yield
        streams.current = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    streams.current = "side"
    assert [*DeviceLoader(range(3), upload=lambda _: streams.current)] == ["side"] * 3


def test_loader_without_buffer_is_refused():
    with pytest.raises(GraphstashError, match=r"ahead must be at least 1 \(got 0\)"):
        DeviceLoader([], ahead=0)


def test_nothing_is_loaded_before_the_first_request():
    source = iter([1, 2])
    with DeviceLoader(source):
        assert not threads()
    assert next(source) == 1


def test_batches_are_loaded_while_the_consumer_works():
    loaded = threading.Semaphore(0)

    def source():
        for number in range(9):
            loaded.release()
            yield number

    with DeviceLoader(source(), ahead=3) as loader:
        next(loader)
        for _ in range(1 + 3):  # the consumer works on the first batch
            assert loaded.acquire(timeout=SECONDS)


@pytest.mark.parametrize(("ahead", "upload"), [(1, None), (5, lambda batch: batch)])
def test_at_most_ahead_batches_are_loaded_beyond_the_one_in_use(ahead, upload):
    consumed, most = 0, 0

    def source():
        nonlocal most
        for number in range(1, 201):
            most = max(most, number - consumed)
            yield number

    with DeviceLoader(source(), ahead=ahead, upload=upload) as loader:
        for _ in loader:
            consumed += 1
    # The consumer counts a batch only after the loader has yielded it.
    assert most <= ahead + 1


def test_number_of_live_batches_is_bounded():
    alive, most = weakref.WeakSet(), 0

    def source():
        nonlocal most
        for _ in range(200):
            thing = Thing()
            alive.add(thing)
            most = max(most, len(alive))
            yield thing
            del thing

    with DeviceLoader(source(), ahead=2) as loader:
        assert sum(1 for _ in loader) == 200
    assert most <= 2 + 2  # in use, loaded ahead, and the batch that the source is making
    assert len(alive) == 0


def test_a_batch_is_loaded_while_the_one_before_is_uploaded():
    meet = threading.Barrier(2)  # each side waits for the other, so a serial loader would hang

    def source():
        yield 0
        for number in range(1, 5):
            meet.wait(SECONDS)
            yield number

    def upload(batch):
        if batch < 4:
            meet.wait(SECONDS)
        return batch

    with DeviceLoader(source(), upload=upload) as loader:
        assert list(loader) == [0, 1, 2, 3, 4]


def test_exception_of_source_is_raised_after_earlier_batches():
    def source():
        yield 1
        yield 2
        raise ValueError("third")

    for ahead in (1, 5):
        loader = DeviceLoader(source(), ahead=ahead)
        assert [next(loader), next(loader)] == [1, 2]
        with pytest.raises(ValueError, match="third"):
            next(loader)
        assert not threads()
        assert list(loader) == []


def test_exception_of_upload_is_raised_in_place_of_its_batch():
    loader = DeviceLoader([2, 1, 0, 3], upload=lambda batch: 6 // batch)
    assert [next(loader), next(loader)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(loader)
    assert not threads()


def test_an_exception_of_the_body_ends_the_threads():
    def body():
        with DeviceLoader(range(100)) as loader:
            for _ in loader:
                raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        body()
    assert not threads()


def test_stop_loading_yields_loaded_batches_and_ends():
    source = iter(range(100))
    with DeviceLoader(source, ahead=3, upload=lambda batch: batch) as loader:
        batches = [next(loader), next(loader)]
        loader.stop_loading()
        batches += loader
        assert batches == list(range(len(batches)))
        assert 2 <= len(batches) <= 2 + 3
    assert next(source) == len(batches)
    assert not threads()


def test_close_closes_generator_in_its_thread():
    log = []

    def source():
        try:
            while True:
                log.append(threading.current_thread())
                yield 1
        finally:
            log.append(threading.current_thread())
            log.append("closed")

    with DeviceLoader(source()) as loader:
        next(loader)
    loader.close()
    assert log.pop() == "closed"
    assert len(set(log)) == 1
    assert list(loader) == []


def test_close_uploads_no_loaded_batch():
    held, uploaded, uploading = threading.Event(), [], threading.Event()

    def upload(batch):
        uploaded.append(batch)
        if batch == 1:
            uploading.set()
            held.wait(SECONDS)
        return batch

    loader = DeviceLoader(range(100), ahead=4, upload=upload)
    next(loader)
    assert uploading.wait(SECONDS)
    loader._queue[-1]._future.add_done_callback(lambda _: held.set())
    loader.close()
    assert uploaded == [0, 1]
    assert not threads()


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Example:
    image: torch.Tensor
    name: str


def test_to_device_moves_the_tensors_in_containers():
    x = torch.ones(2)
    batch = {"list": [x, 1], "pair": Pair(x, "text"), "example": Example(x, "seven")}
    batch["mapping"] = OrderedDict(z=(x, None))
    moved = to_device(batch, "meta")
    assert [type(part) for part in moved.values()] == [list, Pair, Example, OrderedDict]
    tensors = [moved["list"][0], moved["pair"].a, moved["example"].image, moved["mapping"]["z"][0]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len({id(tensor) for tensor in tensors}) == 1  # each tensor is moved once
    assert [moved["list"][1], moved["pair"].b, moved["example"].name] == [1, "text", "seven"]
    assert batch["example"].image is x


def test_inline_loader_loads_each_batch_on_demand():
    loaded = []

    def source():
        for number in range(5):
            loaded.append(number)
            yield number

    with InlineLoader(source(), upload=lambda batch: batch * 10) as loader:
        assert next(loader) == 0
        assert loaded == [0]
        assert next(loader) == 10
        loader.stop_loading()
        assert list(loader) == []
        assert loaded == [0, 1]
