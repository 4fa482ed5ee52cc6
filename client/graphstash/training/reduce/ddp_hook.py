"""A communication hook for DistributedDataParallel that sends sparse buckets sparsely.

DDP passes each bucket to the hook when its gradients are complete, and continues with backward.
One thread processes the buckets in that order, which is the same on all ranks. If callbacks chained
the collectives of each bucket, two ranks could run them in different orders, and would then add one
bucket to another.

If a rank or an aggregator is gone, the all-reduce of a bucket fails, and backward raises its error.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from weakref import finalize

import torch
from torch import Tensor, distributed
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined] # torch
from torch.futures import Future

from graphstash._executor import BoundedExecutor
from graphstash.errors import ConfigError
from graphstash.training.reduce.agreement import require_same, require_wire_type, timeout_of
from graphstash.training.reduce.all_reduce import BlockSparseAllReduce, Sent
from graphstash.training.reduce.blocks import BLOCK_ELEMENTS, block_elements, layout_of
from graphstash.training.reduce.thresholding import Thresholding

if TYPE_CHECKING:  # the module needs numpy, which torch does not require
    from graphstash.training.reduce.aggregators.all_reduce import AggregatedAllReduce

__all__ = ["SparseState", "sparse_hook"]

Hook: TypeAlias = Callable[[Any, GradBucket], Future[Tensor]]

_DENSE_ABOVE: Final = 0.7
_SPARSE_BELOW: Final = 0.5
"""Default limits, as shares of nonzero blocks, for links of 1 Gbit/s. Below them, sparse sending is
faster. Faster links need lower limits.
"""

_END_SECONDS: Final = 2.0
"""Seconds that the last bucket may take when a state ends. With a dead rank, it takes longer."""

_UNLIMITED: Final = 2**31
"""Queue capacity. Backward waits for its buckets, so the queue holds at most a model's buckets."""

_MEANS: Final = ("density", "union_density")
_SECONDS: Final = ("pack_seconds", "send_seconds", "unpack_seconds")


def sparse_hook(state: "SparseState", bucket: GradBucket, *_: Tensor) -> Future[Tensor]:
    """Return a future with a bucket's mean over the ranks, as DDP's own reduction does.

    Pass it to `DistributedDataParallel.register_comm_hook`.

    Raises:
        ConfigError: the caller is FSDP or compiled autograd, or two models share the state.
    """
    if not isinstance(bucket, GradBucket):
        raise ConfigError(
            f"sparse_hook got a {type(bucket).__name__} and no bucket of gradients, as FSDP and "
            "torch.compile's python_reducer give: it is for DistributedDataParallel's own reducer"
        )
    return state.reduce(bucket)


class DensityGate:
    """Switches between sparse and dense sending, with hysteresis.

    The gate uses only values that are equal on all ranks, so all ranks decide alike. A look at the
    blocks finds their density. Call `skips` before each send. If it returns False, look, and pass
    the density to `record`. While looks find the tensor dense, the gate skips 1, 2, 4, ..., at most
    `longest` looks, so a dense tensor costs almost nothing.

    Attributes:
        is_dense: Whether the last look found the tensor dense.
    """

    def __init__(self, *, dense_above: float, sparse_below: float, longest: int = 64) -> None:
        """Set the limits, as shares of the blocks.

        Raises:
            ValueError: not 0 <= sparse_below <= dense_above <= 1.
        """
        if not 0 <= sparse_below <= dense_above <= 1:
            raise ValueError(
                f"sparse_below={sparse_below} and dense_above={dense_above}: take shares of the "
                "blocks with 0 <= sparse_below <= dense_above <= 1"
            )
        self._dense_above = dense_above
        self._sparse_below = sparse_below
        self._longest = longest
        self._pause = 1
        self._left = 0
        self.is_dense = False

    @property
    def limit(self) -> float:
        """Density of the union above which the next look counts the tensor as dense."""
        return self._sparse_below if self.is_dense else self._dense_above

    def skips(self) -> bool:
        """Return whether to send the tensor whole, without a look. Call it once for each send."""
        if self.is_dense and self._left > 0:
            self._left -= 1
            return True
        return False

    def record(self, union_density: float) -> None:
        """Record the density of the union, which is equal on all ranks."""
        was_dense, self.is_dense = self.is_dense, union_density > self.limit
        if self.is_dense:
            self._pause = min(self._pause * 2, self._longest) if was_dense else 1
            self._left = self._pause


class BucketStatistics:
    """The totals of many `Sent`."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, sent: Sent) -> None:
        """Add one `Sent`. It has 0 blocks if the bucket was sent without a look at its blocks."""
        self._sums["looks" if sent.blocks else "whole"] += 1
        self._sums["sent_bytes"] += sent.bitmap_bytes + sent.block_bytes
        self._sums["dense_bytes"] += sent.dense_bytes
        for name in (*_MEANS, *_SECONDS):
            self._sums[name] += getattr(sent, name)

    def add_all(self, other: "BucketStatistics") -> None:
        """Add the totals of another bucket."""
        for name, value in other._sums.items():
            self._sums[name] += value

    def report(self) -> dict[str, float]:
        """Return the totals by name.

        `looks` and `whole` count the sends with and without a look at the blocks. `density` and
        `union_density` are means over the looks, 0 to 1. `sent_bytes` includes whole buckets.
        `saved_bytes` is the size of all gradients less `sent_bytes`.
        """
        sums = self._sums
        return {
            **{name: sums[name] for name in ("looks", "whole")},
            **{name: sums[name] / (sums["looks"] or 1) for name in _MEANS},
            "sent_bytes": sums["sent_bytes"],
            "saved_bytes": sums["dense_bytes"] - sums["sent_bytes"],
            **{name: sums[name] for name in _SECONDS},
        }


class SparseState:
    """The hook's state for one model. Every rank creates one, with the same arguments.

    Supports `no_sync`, unused parameters, and `join`, but torch ignores `join`'s
    `divide_by_initial_world_size=False` with any hook. Also supports embeddings with `sparse=True`:
    the mean of their gradients is sparse, with each row that some rank has, and is never sent
    through aggregators. To send fp16 or bf16, set `wire_dtype` or wrap the hook in torch's
    `fp16_compress_wrapper`.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        through: "AggregatedAllReduce | None" = None,
        block_size: int | None = None,
        wire_dtype: torch.dtype | None = None,
        dense_above: float | None = None,
        sparse_below: float | None = None,
        dense: Callable[[distributed.ProcessGroup], tuple[object, Hook]] | None = None,
        thresholding: Thresholding | None = None,
    ) -> None:
        """Create the state, and a process group unless one is given; a collective call.

        Args:
            group: Process group of DDP's ranks that nothing else uses, so not DDP's own. Default: a
                new group of all ranks with the job's timeout, so all ranks must create their state
                at the same point, as for `torch.distributed.new_group`.
            through: All-reduce through aggregators, over the same ranks. The caller closes it after
                this state. Default: the collectives of the group.
            block_size: Elements of a block. Default: for each parameter its rows, or 256; see
                `block_elements`. Ignored with `through`, which has its own block size.
            wire_dtype: Type in which elements are sent: fp16, bf16, fp32 or fp64. Default: their
                own type.
            dense_above: Share of elements in nonzero blocks above which a bucket is sent whole.
                Default: 0.7; with `through` 1, which means never.
            sparse_below: Share below which a bucket is again sent by blocks. Default: 0.5; with
                `through` 1.
            dense: `dense(group)` returns state and hook for buckets that are sent whole, such as
                `PowerSGDState(group)` and `powerSGD_hook`. The hook may send only in this group.
            thresholding: Holds small blocks back for later steps. Default: sends all blocks.

        Raises:
            ValueError: a size or share is out of its range.
            ConfigError: `through` has other ranks, `wire_dtype` cannot be added up, or the ranks
                have different arguments. In the last case, all ranks raise it.
        """
        require_wire_type(wire_dtype)
        if dense_above is None:
            dense_above = _DENSE_ABOVE if through is None else 1.0
        if sparse_below is None:
            sparse_below = min(dense_above, _SPARSE_BELOW if through is None else 1.0)
        self._new_gate = partial(DensityGate, dense_above=dense_above, sparse_below=sparse_below)
        self._new_gate()  # validates both shares
        self._owns_group = group is None
        self._group = _group_of_all() if group is None else group
        self.ranks = distributed.get_process_group_ranks(self._group)
        self._world = len(self.ranks)
        if through is not None and distributed.get_process_group_ranks(through.group) != self.ranks:
            raise ConfigError(
                f"through= adds up over the ranks "
                f"{distributed.get_process_group_ranks(through.group)}, and this state over "
                f"{self.ranks}: give both the same group"
            )
        self._block_size = block_size if through is None else through.block_size
        self._rows = BlockSparseAllReduce(
            self._group, block_size=BLOCK_ELEMENTS if block_size is None else block_size
        )
        self._sums = through or self._rows
        self._wire_dtype = wire_dtype
        self._dense = None if dense is None else dense(self._group)
        self._thresholding = thresholding
        hook = None if self._dense is None else _name_of(self._dense[1])
        require_same(
            self._group,
            f"block_size={self._block_size}, {wire_dtype=}, {dense_above=}, {sparse_below=}, "
            f"through={'aggregators' if through else None}, dense={hook}, "
            f"thresholding={thresholding}",
            wrong="the ranks made different states of the hook",
            advice="give SparseState the same arguments on each",
        )
        self._gates: dict[tuple[int, int], DensityGate] = {}
        self._statistics: dict[tuple[int, int], BucketStatistics] = {}
        self._waiting: set[tuple[int, int]] = set()
        # Its thread is a daemon, so a failed rank can exit while the thread waits for dead ranks.
        self._thread = BoundedExecutor("graphstash-reduce", workers=1, capacity=_UNLIMITED)
        finalize(self, _end, self._thread)

    def close(self) -> None:
        """Stop the thread, and destroy the group if this state created it. Call `close` on every
        rank after the training.
        """
        _end(self._thread)
        if self._owns_group:
            distributed.destroy_process_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start averaging a bucket over the ranks, and return a future with the mean.

        Raises:
            ConfigError: two models share this state.
        """
        gradients = bucket.buffer()
        key = bucket.index(), gradients.numel()
        if key in self._waiting:
            raise ConfigError(
                "two models reduce with one SparseState at the same time, so ranks could take one "
                "for the other; make a SparseState for each model"
            )
        if gradients.is_sparse:
            return self._later(key, gradients, lambda: self._mean_of_rows(gradients, key))
        if self._thresholding is not None:
            parameters = bucket.parameters()
            each = torch.split(gradients, [parameter.numel() for parameter in parameters])
            for parameter, gradient in zip(parameters, each, strict=True):
                size = self._block_size or block_elements(parameter)  # in any bucket
                self._thresholding.hold_back_(parameter, gradient, block_size=size)
        gate = self._gates.setdefault(key, self._new_gate())
        if not gate.skips():
            return self._later(key, gradients, lambda: self._mean_of_blocks(bucket, key, gate))
        if self._dense is not None:  # the thread waits for the hook, to keep the order
            state, hook = self._dense
            self._count(key, Sent.whole(gradients, gradients.nbytes))
            return self._later(key, gradients, lambda: hook(state, bucket).wait())
        return self._later(key, gradients, lambda: self._mean_of_all(gradients, key))

    @property
    def holds_back(self) -> bool:
        """Whether small blocks are held back for later steps."""
        return self._thresholding is not None

    def statistics(self) -> dict[str, Mapping[str, float]]:
        """Return what each bucket has sent so far, by `<number>/<elements>`; see
        `BucketStatistics.report`.
        """
        return {
            f"{number}/{elements}": each.report()
            for (number, elements), each in sorted(self._statistics.items())
        }

    def scalars(self) -> dict[str, float]:
        """Return what all buckets have sent so far, for plots; see `BucketStatistics.report`."""
        total = BucketStatistics()
        for each in self._statistics.values():
            total.add_all(each)
        return total.report()

    def state_dict(self) -> dict[str, Any]:
        """Return the held-back values for a checkpoint. A collective call: all ranks make it."""
        if self._thresholding is None:
            return {}
        return self._thresholding.state_dict(self._group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the held-back values of a checkpoint of any number of ranks."""
        if self._thresholding is not None and state:
            self._thresholding.load_state_dict(state)

    def _mean_of_blocks(
        self, bucket: GradBucket, key: tuple[int, int], gate: DensityGate
    ) -> Tensor:
        if self._dense is not None and hasattr(self._dense[0], "maybe_increase_iter"):
            # PowerSGD counts steps in its hook, which is not called for this bucket.
            self._dense[0].maybe_increase_iter(bucket)
        gradients: Tensor = bucket.buffer()
        sent = self._sums.sum_(
            gradients,
            scale=1 / self._world,
            wire_dtype=self._wire_dtype,
            dense_above=gate.limit,
            layout=layout_of(bucket.parameters(), self._block_size),
        )
        gate.record(sent.union_density)
        self._count(key, sent)
        return gradients

    def _mean_of_all(self, gradients: Tensor, key: tuple[int, int]) -> Tensor:
        sent_bytes = self._sums.sum_whole_(gradients.div_(self._world), wire_dtype=self._wire_dtype)
        self._count(key, Sent.whole(gradients, sent_bytes))
        return gradients

    def _mean_of_rows(self, gradients: Tensor, key: tuple[int, int]) -> Tensor:
        mean, sent = self._rows.sum_sparse(
            gradients, scale=1 / self._world, wire_dtype=self._wire_dtype
        )
        self._count(key, sent)
        return mean

    def _count(self, key: tuple[int, int], sent: Sent) -> None:
        self._statistics.setdefault(key, BucketStatistics()).add(sent)

    def _later(
        self, key: tuple[int, int], gradients: Tensor, work: Callable[[], Tensor]
    ) -> Future[Tensor]:
        """Run `work` in the thread, and return a future of its result. On CUDA, the thread's stream
        first waits for what backward has queued, and backward's stream waits for the result.
        """
        on_cuda = gradients.is_cuda
        done: Future[Tensor] = Future(devices=[gradients.device] if on_cuda else None)
        ready = torch.cuda.current_stream(gradients.device).record_event() if on_cuda else None

        def run() -> None:
            try:
                with torch.cuda.device(gradients.device) if on_cuda else nullcontext():
                    if ready is not None:
                        torch.cuda.current_stream().wait_event(ready)
                    mean = work()
                    self._waiting.discard(key)  # first: backward may submit this bucket again
                    done.set_result(mean)
            except Exception as error:  # noqa: BLE001 - DDP raises it where backward waits
                self._waiting.discard(key)
                done.set_exception(error)  # type: ignore[arg-type] # torch's annotation

        self._waiting.add(key)
        if not self._thread.submit(run):
            raise RuntimeError("this SparseState is closed, or no thread can be started")
        with suppress(RuntimeError):  # raised outside backward, in a rank that has joined
            # Wait before DDP's own callback, which would replace an error by "unable to cast".
            Variable._execution_engine.queue_callback(done.wait)  # type: ignore[arg-type] # torch's annotation
        return done


def _end(thread: BoundedExecutor) -> None:
    """Stop the thread. Wait for its last call, which may return only after backward does."""
    thread.drain(_END_SECONDS)
    thread.close()


def _group_of_all() -> distributed.ProcessGroup:
    """Create a group of all ranks with the job's timeout. With torch's default timeout, the group
    would wait 30 minutes for dead ranks.
    """
    made = distributed.new_group(timeout=timeout_of(distributed.group.WORLD))
    assert isinstance(made, distributed.ProcessGroup)  # noqa: S101 - this rank is in it
    return made


def _name_of(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
