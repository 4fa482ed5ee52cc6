"""Sums by blocks over several ranks, compared with torch's own."""

import math
import os
import signal
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from graphstash import training
from graphstash.training.reduce import BlockSparseAllReduce, SparseState, Thresholding, sparse_hook
from graphstash.training.reduce.blocks import BlockGrid
from support.cases.ranks import assert_same_bits, error_of
from support.cases.sums import ROWS, Hook, assert_sum, drawn, expected, nonzero_blocks, trained


class Counted:
    """Count torch's collectives and their bytes. Gathered bytes count N/2 times."""

    def __enter__(self) -> Self:
        self.bytes = self.calls = 0
        self._all_reduce = distributed.all_reduce
        self._gather = distributed.all_gather_into_tensor

        def all_reduce(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
            self.bytes += tensor.nbytes
            self.calls += 1
            return self._all_reduce(tensor, *arguments, **more)

        def gather(received: Tensor, *arguments: Any, **more: Any) -> Any:
            self.bytes += received.nbytes // 2
            self.calls += 1
            return self._gather(received, *arguments, **more)

        distributed.all_reduce = all_reduce
        distributed.all_gather_into_tensor = gather  # type: ignore[assignment] # has names
        return self

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce = self._all_reduce
        distributed.all_gather_into_tensor = self._gather


def aligned(nbytes: int) -> int:
    return math.ceil(nbytes / 16) * 16


def gathers(ranks: int, most_bytes: int, union_bytes: int) -> bool:
    """Return whether a gather costs less than a ring, with 4 KiB for each message."""
    return ranks * most_bytes < 2 * union_bytes + ranks * 4096


def bytes_of(values: Tensor, block: int, ranks: list[list[int]]) -> int:
    """Return the bytes that a sum by blocks should send, with at most one slot of blocks."""
    union = {number for each in ranks for number in each}
    world, most = len(ranks), max(map(len, ranks))
    size, opening = block * values.element_size(), max(128, 16384 // world // 16 * 16)
    total = world * opening // 2
    in_opening = [0] * world
    if is_exchanged := 16 + 4 * most <= opening:
        fits = [aligned(16 + 4 * len(own)) + len(own) * size <= opening for own in ranks]
        in_opening = [len(own) * fit for own, fit in zip(ranks, fits, strict=True)]
    else:
        bitmap = math.ceil(math.ceil(len(values) / block) / 8)
        is_exchanged = gathers(world, most * 4, bitmap)
        total += world * most * 4 // 2 if is_exchanged else bitmap
    rest = max(max(0, len(own) - sent) for own, sent in zip(ranks, in_opening, strict=True))
    numbers = 0 if is_exchanged else 4
    if gathers(world, rest * (size + numbers), len(union) * size):
        return total + world * (aligned(rest * numbers) + aligned(rest * size)) // 2
    elements = sum(min(block, len(values) - number * block) for number in union)
    return total + values.element_size() * elements


def sums(*, count: int) -> None:
    for name, values, block in drawn(5, count, (1, 3, 64, 256, 1024)):
        dense, once, again = (values.clone() for _ in range(3))
        distributed.all_reduce(dense)
        reduce = BlockSparseAllReduce(block_size=block)
        with Counted() as counted:
            sent = reduce.sum_(once)
        reduce.sum_(again)
        assert_sum(name, once, dense)
        assert_same_bits(name, once, again)
        formula = bytes_of(values, block, nonzero_blocks(values, block))
        assert counted.bytes == sent.bitmap_bytes + sent.block_bytes == formula, name
        third = len(values) // 3
        edges = sorted({0, third, min(third + 1, len(values)), len(values)})
        parts = [*pairwise(edges)]
        layout = (BlockGrid(block, (*parts[::2],)), BlockGrid(block + 1, (*parts[1::2],)))
        again.copy_(values)
        reduce.sum_(again, layout=layout)
        assert_sum(f"{name} in parts", again, dense)
        assert_same_bits(name, again)
    zeros = torch.full((64,), -0.0)
    zeros[16 * distributed.get_rank()] = 1.0  # blocks of each rank's own are gathered
    BlockSparseAllReduce(block_size=16).sum_(zeros)
    assert_same_bits("negative zeros", zeros)


def sums_free_their_tensors(*, count: int) -> None:
    """Require that no thread of gloo frees a tensor of a sum. It needs the interpreter lock then,
    and a process that destroys its group may hold this lock until the thread ends.
    """
    freed_in: list[int] = []
    references = []

    def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            for each in arguments:
                if isinstance(each, Tensor):
                    noted = weakref.ref(each, lambda _: freed_in.append(threading.get_ident()))
                    references.append(noted)
            return collective(*arguments, **more)

        return call

    with (
        patch.object(distributed, "all_reduce", watched(distributed.all_reduce)),
        patch.object(
            distributed, "all_gather_into_tensor", watched(distributed.all_gather_into_tensor)
        ),
    ):
        reduce, rank = BlockSparseAllReduce(block_size=64), distributed.get_rank()
        for _ in range(count):
            for rows in (1, 12, 400):  # one message, a gather, and a ring
                flat = torch.zeros(5000, 64)
                flat[7 * rank : 7 * rank + rows] = 1.0
                reduce.sum_(flat.view(-1))
    assert len(freed_in) > 3 * count
    assert set(freed_in) == {threading.get_ident()}


def sparse(**arguments: Any) -> Hook:
    return lambda _: (SparseState(block_size=16, **arguments), sparse_hook)


def wrapped_in_fp16(_: DistributedDataParallel) -> tuple[Any, Any]:
    return SparseState(block_size=16), default_hooks.fp16_compress_wrapper(sparse_hook)


def power_sgd(group: Any) -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        orthogonalization_epsilon=1e-8,  # avoids a division of zeros by zero
    )
    return state, powerSGD_hook.powerSGD_hook


def require_sparse(statistics: dict[str, Any]) -> None:
    largest = max(statistics.values(), key=lambda each: each["looks"] * each["sent_bytes"])
    assert 0 < largest["density"] < largest["union_density"] < 0.1
    assert largest["sent_bytes"] < 0.1 * largest["looks"] * 16 * ROWS * 4
    assert largest["whole"] == 0


def require_rows_counted(statistics: dict[str, Any]) -> None:
    (rows,) = [each for name, each in statistics.items() if name.endswith(f"/{16 * ROWS}")]
    assert 0 < rows["density"] < rows["union_density"] < 0.1
    assert rows["sent_bytes"] < rows["looks"] * (8192 + 0.1 * ROWS * 16 * 4)
    assert rows["sent_bytes"] + rows["saved_bytes"] == rows["looks"] * 16 * ROWS * 4


def require_rare_looks(statistics: dict[str, Any]) -> None:
    for bucket in statistics.values():
        assert bucket["whole"] > bucket["looks"] or bucket["looks"] + bucket["whole"] < 4


def require_half_sent(statistics: dict[str, Any]) -> None:
    for bucket in statistics.values():
        total = bucket["saved_bytes"] + bucket["sent_bytes"]
        messages = bucket["looks"] * 8184  # the first ones of three ranks
        assert bucket["sent_bytes"] - messages < 0.55 * total


def require_some_whole(statistics: dict[str, Any]) -> None:
    assert any(bucket["whole"] > 0 for bucket in statistics.values())


ALWAYS_DENSE = {"dense_above": 0, "sparse_below": 0}
HOOKS: dict[str, tuple[Hook, float, dict[str, Any], Callable[[dict[str, Any]], None] | None]] = {
    "plain": (sparse(), 1e-6, {}, require_sparse),
    "accumulated": (sparse(), 1e-6, {"accumulate": 3}, None),
    "uneven": (sparse(), 1e-6, {"uneven": True}, None),
    "gradients in buckets": (sparse(), 1e-6, {"gradient_as_bucket_view": True}, None),
    "sparse embedding": (sparse(), 1e-6, {"sparse": True}, require_rows_counted),
    "dense": (sparse(**ALWAYS_DENSE), 1e-6, {"steps": 12}, require_rare_looks),
    "dense, bf16 on the wire": (
        sparse(**ALWAYS_DENSE, wire_dtype=torch.bfloat16),
        2e-2,
        {"steps": 12},
        require_half_sent,
    ),
    "bf16 on the wire": (sparse(wire_dtype=torch.bfloat16), 2e-2, {}, None),
    "fp16 around it": (wrapped_in_fp16, 1e-3, {}, None),
    "PowerSGD for the dense": (
        sparse(dense_above=0.3, sparse_below=0.2, dense=power_sgd),
        0.2,
        {"steps": 12},
        require_some_whole,
    ),
}
"""A hook, its tolerance to a dense all-reduce, the training arguments, and a check of
statistics."""


def trains_the_same(*, name: str) -> None:
    hook, tolerance, arguments, require = HOOKS[name]
    plain = expected(**arguments)
    values, state = trained(hook, **arguments)
    torch.testing.assert_close(values, plain, rtol=tolerance, atol=tolerance)
    assert_same_bits(name, values)
    if require is not None:
        require(state.statistics())
    if name == "PowerSGD for the dense":
        assert float((values - plain).abs().max()) > 1e-6  # the hook is lossy


def disagreements() -> dict[str, str]:
    """Return this rank's message for each disagreement of the ranks."""
    rank = distributed.get_rank()
    first, model, same = rank == 0, nn.Linear(2, 2), BlockSparseAllReduce()
    for each in (torch.ones(10), torch.ones(12), torch.ones(10, dtype=torch.int32)):
        same.sum_(each)

    def typed(dtype: torch.dtype) -> Tensor:
        return torch.ones(10, dtype=torch.float32 if first else dtype)

    cases: dict[str, Callable[[], object]] = {
        "sizes": lambda: BlockSparseAllReduce().sum_(torch.ones(10 + rank)),
        "types": lambda: BlockSparseAllReduce().sum_(typed(torch.float64)),
        "blocks": lambda: BlockSparseAllReduce(block_size=8 + rank).sum_(torch.ones(10)),
        "sizes in other orders": lambda: same.sum_(torch.ones(10 if first else 12)),
        "types in other orders": lambda: same.sum_(typed(torch.int32)),
        "limits": lambda: same.sum_(torch.ones(10), dense_above=0.5 if first else 1.0),
        "hooks of dense buckets": lambda: SparseState(dense=power_sgd if first else None),
        "thresholds": lambda: SparseState(thresholding=Thresholding(model) if first else None),
        "complex to real": lambda: same.sum_(torch.ones(9) * 1j, wire_dtype=torch.bfloat16),
        "real to integer": lambda: same.sum_(torch.ones(9) / 2, wire_dtype=torch.int8),
    }
    return {name: error_of(work) for name, work in cases.items()}


def misuses() -> dict[str, str]:
    """Return this rank's message for each misuse of groups and models."""
    messages = {}
    one, two = (DistributedDataParallel(nn.Linear(64, 8)) for _ in range(2))
    with SparseState() as shared:
        for each in (one, two):
            each.register_comm_hook(shared, sparse_hook)
        both = one(torch.ones(4, 64)).sum() + two(torch.ones(4, 64)).sum()
        messages["two models"] = error_of(both.backward)
        distributed.barrier()  # after the started collectives
    real = DistributedDataParallel(nn.Linear(4, 1))
    real.register_comm_hook(SparseState(wire_dtype=torch.complex64), sparse_hook)
    messages["in backward"] = error_of(real(torch.ones(2, 4)).sum().backward)
    some = distributed.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(4, 1))
    if distributed.get_rank() < 2:
        messages["some ranks"] = error_of(lambda: train_with(model, SparseState(some)))
    distributed.barrier()
    train_with(model, SparseState())
    messages["twice"] = error_of(lambda: train_with(model, SparseState()))
    state = SparseState()
    backend: Any = state._group
    options = backend._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() == 600  # as in the default group
    state.close()
    messages["closed"] = error_of(
        lambda: state._later((0, 1), torch.ones(1), lambda: torch.ones(1))
    )
    return messages


def train_with(model: nn.Module, state: SparseState) -> None:
    training.train(
        model,
        training.SGD(model.parameters(), lr=0.1),
        [(torch.ones(2, 4),)] * 2,
        steps=2,
        loss=lambda model, batch: model(*batch).square().mean(),
        reduce=state,
        progress=False,
    )


def held_back() -> None:
    """Require that checkpoints contain held-back blocks, as a mean of all ranks."""
    modules: list[nn.Module] = []
    made: list[Thresholding] = []

    def hook(model: DistributedDataParallel) -> tuple[Any, Any]:
        modules.append(model.module)
        made.append(Thresholding(model.module, keep=0.2, refresh_every=2, largest_error=1))
        return SparseState(block_size=16, thresholding=made[0]), sparse_hook

    values, state = trained(hook)
    assert_same_bits("parameters", values)
    total = {name: made[0].waiting(each) for name, each in modules[0].named_parameters()}
    assert sum(float(value.norm()) for value in total.values()) > 0
    saved = state.state_dict()
    again = SparseState(thresholding=Thresholding(modules[0]))
    again.load_state_dict(saved)
    for name, waiting in sorted(total.items()):
        value = waiting.clone()
        distributed.all_reduce(value)
        mean, loaded = saved["held"][name], again.state_dict()["held"][name]
        torch.testing.assert_close(mean * distributed.get_world_size(), value, rtol=0, atol=1e-6)
        torch.testing.assert_close(loaded, mean)


def looped(directory: Path, steps: int, *, thresholding: bool) -> tuple[Tensor, list[Any], float]:
    """Train by `train` with a hook; return parameters, callback reports, and held-back gradients.

    The model has one parameter. DDP reorders several parameters after each process's first step,
    and gloo's order of addition depends on their places, so a resumed job would differ.
    """
    torch.manual_seed(0)
    model = nn.EmbeddingBag(ROWS, 16)
    seen = []

    class Seen(training.Callback):
        def on_log(self, entry: training.LogEntry) -> None:
            seen.append(entry.reduced)

    mine = torch.Generator().manual_seed(distributed.get_rank())
    batches = [(torch.randint(0, ROWS, (4, 3), generator=mine),) for _ in range(12)]
    held = Thresholding(model, keep=0.2, refresh_every=2, largest_error=1)
    training.train(
        model,
        training.SGD(model.parameters(), lr=0.1),
        batches,
        steps=steps,
        loss=lambda model, batch: model(*batch).square().mean(),
        reduce=SparseState(block_size=16, thresholding=held if thresholding else None),
        checkpoints=directory,
        callbacks=[Seen()],
        log_every=4,
        progress=False,
    )
    return model.weight.detach(), seen, float(held.waiting(model.weight).norm())


def resumed(*, directory: str) -> None:
    """`train` resumes with the hook from a checkpoint, and reports sent bytes to callbacks."""
    at = Path(directory)
    whole, seen, waits = looped(at / "whole", 12, thresholding=False)
    parts = [looped(at / "parts", steps, thresholding=False)[0] for steps in (8, 12)]
    assert_same_bits("resumed", whole, parts[1])
    assert waits == 0
    first, last = seen[0], seen[-1]
    assert 0 < first["sent_bytes"] < last["sent_bytes"] < last["saved_bytes"]
    assert 0 < last["density"] < last["union_density"] < 0.1
    held, _, waits = looped(at / "held", 8, thresholding=True)
    assert waits > 0
    assert not torch.equal(held, parts[0])
    assert_same_bits("held back", looped(at / "held", 12, thresholding=True)[0])


def killed() -> str:
    """Kill the last rank in the middle of a sum, and return the message on this rank."""

    class Deadly(BlockSparseAllReduce):
        calls = 0

        def _union(self, *blocks: Any) -> Any:
            found = super()._union(*blocks)
            self.calls += 1
            if distributed.get_rank() == distributed.get_world_size() - 1 and self.calls == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

    def hook(_: DistributedDataParallel) -> tuple[Any, Any]:
        state = SparseState(block_size=16)
        state._sums = Deadly(state._group, block_size=16)
        return state, sparse_hook

    return error_of(lambda: trained(hook))
