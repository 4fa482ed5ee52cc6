"""Adds up gradients of several processes by blocks, beside torch's own way; reports both."""

import argparse
import hashlib
import json
import math
import os
import random
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from graphstash import ConfigError, training
from graphstash.training.reduce import (
    BlockSparseAllReduce,
    SparseState,
    Thresholding,
    sparse_hook,
)

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--on", choices=("gloo",))
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
parser.add_argument("--killed", action="store_true", help="the last rank, in the middle")
options = parser.parse_args()

ROWS = 3000
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int8, torch.uint8),
]
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-6, torch.float64: 1e-12}


def digest(values):
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Counted:
    """How many bytes torch's all-reduce is handed meanwhile."""

    def __enter__(self):
        self.bytes = 0
        self._all_reduce = distributed.all_reduce

        def all_reduce(tensor, *arguments, **more):
            self.bytes += tensor.nbytes
            return self._all_reduce(tensor, *arguments, **more)

        distributed.all_reduce = all_reduce
        return self

    def __exit__(self, *_):
        distributed.all_reduce = self._all_reduce


def sums():
    """Many tensors, in all types, sizes, densities, block sizes and overlaps."""
    cases = []
    same = random.Random(5)
    for number in range(160):
        dtype = same.choice(DTYPES)
        block = same.choice([1, 3, 64, 256, 1024])
        elements = same.choice([0, 1, block - 1, block, block + 1, 1000, 5000, 100_003])
        density, overlaps = same.choice([0, 0.01, 0.3, 1]), same.random() < 0.5
        blocks = math.ceil(elements / block)
        mine = torch.Generator().manual_seed(number * 100 + options.rank)
        places = torch.Generator().manual_seed(number) if overlaps else mine
        keep = torch.rand(blocks, generator=places) < density
        values = (torch.randn(elements, generator=mine) * 4).to(dtype)
        values[~keep.repeat_interleave(block)[:elements]] = 0
        if number % 10 == 0 and elements and dtype.is_floating_point:
            values[elements // 2] = math.nan if options.rank else math.inf
        dense = values.clone()
        distributed.all_reduce(dense)
        twice = [values.clone(), values.clone()]
        reduce = BlockSparseAllReduce(block_size=block)
        with Counted() as counted:
            sent = reduce.sum_(twice[0])
        reduce.sum_(twice[1])
        limit = TOLERANCE.get(dtype, 0)
        union = [bool((part != 0).any()) for part in values.split(block)] if elements else []
        unions = [None] * options.world
        distributed.all_gather_object(unions, union)
        chosen = [any(each) for each in zip(*unions, strict=True)]
        lengths = [min(block, elements - start * block) for start in range(blocks)]
        cases.append(
            {
                "name": f"{number} {dtype} {elements} in {block} at {density}",
                "equal": torch.allclose(
                    twice[0].double(), dense.double(), rtol=limit, atol=limit, equal_nan=True
                ),
                "digests": [digest(each) for each in twice],
                "handed over": counted.bytes,
                "said": sent.bitmap_bytes + sent.block_bytes,
                "formula": 16
                + math.ceil(blocks / 8)
                + values.element_size() * sum(n for n, is_sent in zip(lengths, chosen) if is_sent),  # noqa: B905
            }
        )
    return cases


class Model(nn.Module):
    def __init__(self, *, sparse=False):
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, 16, sparse=sparse)
        self.unused = nn.Linear(16, 16)
        self.convolution = nn.Conv2d(1, 4, 3)
        weight = self.convolution.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.head = nn.Linear(16, 1)

    def forward(self, rows, uses_all):
        found = self.rows(rows)
        image = self.convolution(found.view(-1, 1, 4, 4)).mean()
        if uses_all:
            found = self.unused(found)
        return self.head(found).square().mean() + image


def trained(hook, *, sparse=False, accumulate=1, uneven=False, steps=6, delays=None, **more):
    """A model's parameters after some steps in DDP; `hook` makes state and hook."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Model(sparse=sparse),
        find_unused_parameters=True,
        bucket_cap_mb=0.02,
        **more,
    )
    made = hook(model) if hook is not None else None
    if made is not None:
        model.register_comm_hook(*made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.Generator().manual_seed(options.rank)
    steps += options.rank * 2 if uneven else 0
    pauses = random.Random(options.rank)
    with model.join() if uneven else nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            for number in range(accumulate):
                rows = torch.randint(0, ROWS, (4, 3), generator=mine)
                last = number == accumulate - 1
                with nullcontext() if last else model.no_sync():
                    model(rows, step % 2 == 0).backward()
            if delays:
                time.sleep(pauses.random() * delays)
            optimizer.step()
    values = torch.cat([p.detach().reshape(-1) for p in model.module.parameters()])
    return values, made[0] if made is not None else None


def compared(hook, tolerance=1e-6, plain=None, **arguments):
    """Whether a hook trains what torch alone does."""
    expected, _ = trained(plain, **arguments)
    values, state = trained(hook, **arguments)
    return {
        "equal": torch.allclose(values, expected, rtol=tolerance, atol=tolerance),
        "error": float((values - expected).abs().max()),
        "digest": digest(values),
        "statistics": state.statistics() if isinstance(state, SparseState) else None,
    }


def sparse(**arguments):
    return lambda _: (SparseState(block_size=16, **arguments), sparse_hook)


def wrapped_in_fp16(_):
    return SparseState(block_size=16), default_hooks.fp16_compress_wrapper(sparse_hook)


def power_sgd(group):
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        orthogonalization_epsilon=1e-8,  # or it divides zeros by zero
    )
    return state, powerSGD_hook.powerSGD_hook


def disagreements():
    """What every rank is told when they do not do the same."""
    same = BlockSparseAllReduce()
    for each in (torch.ones(10), torch.ones(12), torch.ones(10, dtype=torch.int32)):
        same.sum_(each)
    first = options.rank == 0
    model = nn.Linear(2, 2)
    cases = {
        "sizes": lambda: BlockSparseAllReduce().sum_(torch.ones(10 + options.rank)),
        "types": lambda: BlockSparseAllReduce().sum_(
            torch.ones(10, dtype=torch.float32 if first else torch.float64)
        ),
        "blocks": lambda: BlockSparseAllReduce(block_size=8 + options.rank).sum_(torch.ones(10)),
        "sizes in other orders": lambda: same.sum_(torch.ones(10 if first else 12)),
        "types in other orders": lambda: same.sum_(
            torch.ones(10, dtype=torch.float32 if first else torch.int32)
        ),
        "limits": lambda: same.sum_(torch.ones(10), dense_above=0.5 if first else 1.0),
        "hooks of dense buckets": lambda: SparseState(dense=power_sgd if first else None),
        "thresholds": lambda: SparseState(thresholding=Thresholding(model) if first else None),
        "complex to real": lambda: same.sum_(torch.ones(9) * 1j, wire_dtype=torch.bfloat16),
        "real to integer": lambda: same.sum_(torch.ones(9) / 2, wire_dtype=torch.int8),
    }
    return {name: told_by(work) for name, work in cases.items()}


def told_by(work):
    try:
        work()
    except ConfigError as error:
        return str(error)


def held_back():
    """A model whose small blocks wait, and what the ranks keep of them."""
    models, made = [], []

    def hook(model):
        models.append(model.module)
        made.append(Thresholding(model.module, keep=0.2, refresh_every=2, largest_error=1))
        return SparseState(block_size=16, thresholding=made[0]), sparse_hook

    values, state = trained(hook)
    waiting = {name: made[0].waiting(each) for name, each in models[0].named_parameters()}
    saved = state.state_dict()
    total = {name: value.clone() for name, value in sorted(waiting.items())}
    for value in total.values():
        distributed.all_reduce(value)
    again = SparseState(thresholding=Thresholding(models[0]))
    again.load_state_dict(saved)
    loaded = again.state_dict()
    return {
        "digest": digest(values),
        "waits": sum(float(value.norm()) for value in waiting.values()),
        "means": all(
            torch.allclose(saved["held"][name] * options.world, value, atol=1e-6)
            for name, value in total.items()
        ),
        "again": all(torch.allclose(loaded["held"][name], saved["held"][name]) for name in total),
    }


def looped(directory, steps, thresholding):
    """`train` with a hook, and what callbacks see of it.

    The model has one parameter. DDP puts several into another order after the first step of each
    process, and gloo adds up in an order that depends on the place: a resumed job would differ.
    """
    torch.manual_seed(0)
    model = nn.EmbeddingBag(ROWS, 16)
    seen = []

    class Seen(training.Callback):
        def on_log(self, entry):
            seen.append(entry.reduced)

    mine = torch.Generator().manual_seed(options.rank)
    batches = [(torch.randint(0, ROWS, (4, 3), generator=mine),) for _ in range(12)]
    held = Thresholding(model, keep=0.2, refresh_every=2, largest_error=1)
    state = SparseState(block_size=16, thresholding=held if thresholding else None)
    result = training.train(
        model,
        training.SGD(model.parameters(), lr=0.1),
        batches,
        steps=steps,
        loss=lambda model, batch: model(*batch).square().mean(),
        reduce=state,
        checkpoints=directory,
        callbacks=[Seen()],
        log_every=4,
        progress=False,
    )
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "digest": digest(parameters),
        "losses": result.losses,
        "seen": seen,
        "waits": float(sum(held.waiting(p).norm() for p in model.parameters())),
    }


def looped_with_a_pause(name, *, thresholding):
    place = options.rendezvous.with_suffix(f".{name}")
    parts = [looped(place / "parts", steps, thresholding) for steps in (8, 12)]
    return {"whole": looped(place / "whole", 12, thresholding), "parts": parts}


def misuses():
    """What is told of mistakes with groups and models."""
    told = {}
    torch.manual_seed(0)
    one, two = (DistributedDataParallel(nn.Linear(64, 8)) for _ in range(2))
    with SparseState() as shared:
        for model in (one, two):
            model.register_comm_hook(shared, sparse_hook)
        try:
            (one(torch.ones(4, 64)).sum() + two(torch.ones(4, 64)).sum()).backward()
        except (ConfigError, RuntimeError) as error:
            told["two models"] = str(error)
        time.sleep(0.2)  # for what has begun
    integers = DistributedDataParallel(nn.Linear(4, 1))
    integers.register_comm_hook(SparseState(wire_dtype=torch.int8), sparse_hook)
    told["in backward"] = told_by(lambda: integers(torch.ones(2, 4)).sum().backward())
    some = distributed.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(4, 1))
    if options.rank < 2:
        try:
            loop_of(model, SparseState(some))
        except ConfigError as error:
            told["some ranks"] = str(error)
    distributed.barrier()
    loop_of(model, SparseState())
    try:
        loop_of(model, SparseState())
    except ConfigError as error:
        told["twice"] = str(error)
    state = SparseState()
    group = state._group._get_backend(torch.device("cpu"))
    told["timeout"] = group.options._timeout.total_seconds()
    state.close()
    try:
        state._later((0, 1), torch.ones(1), lambda: torch.ones(1))
    except RuntimeError as error:
        told["closed"] = str(error)
    return told


def loop_of(model, state):
    training.train(
        model,
        training.SGD(model.parameters(), lr=0.1),
        [(torch.ones(2, 4),)] * 2,
        steps=2,
        loss=lambda model, batch: model(*batch).square().mean(),
        reduce=state,
        progress=False,
    )


def begin():
    distributed.init_process_group(
        "gloo",
        init_method=options.rendezvous.as_uri(),
        rank=options.rank,
        world_size=options.world,
        timeout=timedelta(seconds=100),
    )


def end(report):
    options.report.write_text(json.dumps(report))
    if not options.killed:
        distributed.monitored_barrier()  # the first one keeps the store
    os._exit(0)


def killed():
    """The last rank is killed in the middle: what the others are told."""

    class Deadly(BlockSparseAllReduce):
        def union_of(self, nonzero):
            found = super().union_of(nonzero)
            if options.rank == options.world - 1 and self.calls == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            return found

        calls = 0

    def hook(_):
        state = SparseState(block_size=16)
        state._sums = Deadly(state._group, block_size=16)
        return state, sparse_hook

    try:
        trained(hook)
    except RuntimeError as error:
        return {"error": str(error)}


begin()
if options.killed:
    end(killed())
torch.manual_seed(0)
end(
    {
        "sums": sums(),
        "trained": {
            "as it is": compared(sparse()),
            "accumulated": compared(sparse(), accumulate=3),
            "uneven": compared(sparse(), uneven=True),
            "gradients in buckets": compared(sparse(), gradient_as_bucket_view=True),
            "late ranks": compared(sparse(), delays=0.02),
            "sparse embedding": compared(sparse(), sparse=True),
            "dense": compared(sparse(dense_above=0, sparse_below=0), steps=12),
            "dense, bf16 on the wire": compared(
                sparse(dense_above=0, sparse_below=0, wire_dtype=torch.bfloat16),
                tolerance=2e-2,
                steps=12,
            ),
            "bf16 on the wire": compared(sparse(wire_dtype=torch.bfloat16), tolerance=2e-2),
            "fp16 around it": compared(
                wrapped_in_fp16,
                plain=lambda _: (distributed.group.WORLD, default_hooks.fp16_compress_hook),
                tolerance=1e-3,
            ),
            "PowerSGD for the dense": compared(
                sparse(dense_above=0.3, sparse_below=0.2, dense=power_sgd), tolerance=0.2, steps=12
            ),
        },
        "disagreements": disagreements(),
        "misuses": misuses(),
        "held back": held_back(),
        "looped": looped_with_a_pause("exact", thresholding=False),
        "looped and held back": looped_with_a_pause("held", thresholding=True),
    }
)
