"""Streams of DDP, of its captured step and of its fused updates. The tests need no GPU."""

import contextlib

import pytest
import torch
from torch import distributed, nn

from graphstash.errors import ConfigError
from graphstash.training.fusion.order import StreamOrder
from graphstash.training.loop import parallel
from graphstash.training.reduce import SparseState


@pytest.fixture
def calls(monkeypatch):
    """Record each call with the stream on which it happens."""
    found = []
    streams = ["default"]

    class Stream:
        def __init__(self, _, name="side"):
            self.name = name

        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream.name)
        yield
        streams.pop()

    class Ddp(nn.Module):
        def __init__(self, module, *, device_ids):
            super().__init__()
            self.module = module
            found.append(f"DDP of {device_ids} on {streams[-1]}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, streams[-1]))
    monkeypatch.setattr(parallel, "DistributedDataParallel", Ddp)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    return found


CUDA = torch.device("cuda", 0)


def test_ddp_of_a_captured_step_is_made_on_a_side_stream(calls):
    parallel.DistributedTorch(CUDA).wrap(nn.Linear(1, 1), is_captured=True)
    assert calls == ["side waits for default", f"DDP of {[CUDA]} on side", "default waits for side"]


@pytest.mark.parametrize(
    ("device", "is_captured"), [(CUDA, False), (torch.device("cpu"), True)], ids=["eager", "CPU"]
)
def test_other_ddp_is_made_on_the_current_stream(calls, device, is_captured):
    parallel.DistributedTorch(device).wrap(nn.Linear(1, 1), is_captured=is_captured)
    assert calls == [f"DDP of {[CUDA] if device == CUDA else None} on default"]


def test_ddp_of_a_model_on_several_devices_names_none(calls):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    parallel.DistributedTorch(CUDA).wrap(model)
    assert calls == ["DDP of None on default"]


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=str)
def test_objects_are_gathered_through_the_device_of_the_model(calls, monkeypatch, device):
    current = [torch.device("cpu")]

    @contextlib.contextmanager
    def on(chosen):
        current.append(chosen)
        yield
        current.pop()

    def gather(payloads, mine):
        payloads[:] = [mine, mine]
        calls.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    assert parallel.DistributedTorch(device).gather(7) == [7, 7]
    assert calls == [device]


def test_ddp_of_the_user_is_kept(calls):
    model = parallel.DistributedTorch(CUDA).wrap(nn.Linear(1, 1))
    calls.clear()
    assert parallel.DistributedTorch(CUDA).wrap(model, is_captured=True) is model
    assert calls == []


def test_sparse_reduction_of_a_captured_step_is_refused(calls):
    state = object.__new__(SparseState)
    with pytest.raises(ConfigError, match="cannot be captured as a CUDA graph"):
        parallel.DistributedTorch(CUDA).wrap(nn.Linear(1, 1), reduce=state, is_captured=True)


def test_each_update_waits_for_the_update_before_on_another_stream(calls, monkeypatch):
    streams = {name: torch.cuda.Stream(CUDA, name) for name in ("main", "first", "second")}
    current = "first"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[current])
    order = StreamOrder()
    for current in ("first", "first", "second", "main"):  # noqa: B007 - `current_stream` reads it
        order.follow(CUDA)
    order.follow(torch.device("cpu"))
    assert calls == ["second waits for first", "main waits for second"]
    order.forget()
    current = "first"
    order.follow(CUDA)
    assert len(calls) == 2
