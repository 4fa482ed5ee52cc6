"""The hook of DistributedDataParallel that sends sparse buckets sparsely.

DDP hands over each bucket when its gradients are there, and goes on with backward. One thread takes
the buckets in that order, which is the same on all ranks: were each bucket's next collective begun
when its last one ends, two ranks could begin those of two buckets in different orders, and add up
one with the other.
"""

import time
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
from graphstash.training.reduce.agreement import require_same
from graphstash.training.reduce.all_reduce import BLOCK_ELEMENTS, BlockSparseAllReduce, Sent
from graphstash.training.reduce.density_gate import DensityGate
from graphstash.training.reduce.group_timeout import timeout_of
from graphstash.training.reduce.statistics import BucketStatistics
from graphstash.training.reduce.thresholding import Thresholding

if TYPE_CHECKING:  # it needs numpy, which torch does not
    from graphstash.training.reduce.aggregators.all_reduce import AggregatedAllReduce

__all__ = ["SparseState", "sparse_hook"]

Hook: TypeAlias = Callable[[Any, GradBucket], Future[Tensor]]

_DENSE_ABOVE: Final = 0.7
_SPARSE_BELOW: Final = 0.5
"""Where packing and the bitmap pay on 1 Gbit/s; the faster the link, the lower."""

_UNLIMITED: Final = 2**31
"""Backward waits for its buckets, so no more of them wait than the model has."""


def sparse_hook(state: "SparseState", bucket: GradBucket, *_: Tensor) -> Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook`: the mean over the ranks, as DDP's own.

    Raises:
        ConfigError: FSDP or compiled autograd calls it, or two models share the state.
    """
    if not isinstance(bucket, GradBucket):
        raise ConfigError(
            f"sparse_hook got a {type(bucket).__name__} and no bucket of gradients, as FSDP and "
            "torch.compile's python_reducer give: it is for DistributedDataParallel's own reducer"
        )
    return state.reduce(bucket)


class SparseState:
    """What the hook knows of a model's buckets. Every rank makes one, with the same arguments.

    Works with `no_sync`, unused parameters, `join` (whose `divide_by_initial_world_size=False` does
    nothing with any hook), and embeddings with `sparse=True`: of these torch sends rows, in their
    own type, by the group (gloo), and all of them. For fp16 or bf16 on the wire, give `wire_dtype`,
    or wrap the hook in torch's `fp16_compress_wrapper`.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        *,
        through: "AggregatedAllReduce | None" = None,
        block_size: int = BLOCK_ELEMENTS,
        wire_dtype: torch.dtype | None = None,
        dense_above: float | None = None,
        sparse_below: float | None = None,
        dense: Callable[[distributed.ProcessGroup], tuple[object, Hook]] | None = None,
        thresholding: Thresholding | None = None,
    ) -> None:
        """Takes or makes a process group.

        Args:
            group: of DDP's ranks, and not DDP's own: nobody else may send in it. None makes a group
                of all ranks, with the job's timeout, so all ranks have to make their state
                together, as with `torch.distributed.new_group`.
            through: what adds up over the same ranks; None for the group. Who made it closes it,
                after this.
            block_size: elements of a block, where `through` is None, which has its own.
            wire_dtype: what elements are sent as; None for their own type.
            dense_above: share of blocks that are not zero above which a bucket is sent whole,
            sparse_below: and below which it is sent by blocks again. None for 0.7 and 0.5; through
                aggregators for 1 and 1, which is never.
            dense: `dense(group)` gives state and hook for buckets that are sent whole, such as
                `PowerSGDState(group)` and `powerSGD_hook`; it sends in this group alone.
            thresholding: holds small blocks back; None sends everything, exactly.

        Raises:
            ValueError: when a size or share is out of its range.
            ConfigError: `through` has other ranks; or the ranks have different arguments, and every
                rank is told.
        """
        if dense_above is None:
            dense_above = _DENSE_ABOVE if through is None else 1.0
        if sparse_below is None:
            sparse_below = min(dense_above, _SPARSE_BELOW if through is None else 1.0)
        self._new_gate = partial(DensityGate, dense_above=dense_above, sparse_below=sparse_below)
        self._new_gate()  # checks them
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
        self._sums = through or BlockSparseAllReduce(self._group, block_size=block_size)
        self._wire_dtype = wire_dtype
        self._dense = None if dense is None else dense(self._group)
        self._thresholding = thresholding
        hook = None if self._dense is None else _name_of(self._dense[1])
        require_same(
            self._group,
            f"block_size={self._sums.block_size}, {wire_dtype=}, {dense_above=}, {sparse_below=}, "
            f"through={'aggregators' if through else None}, dense={hook}, "
            f"thresholding={thresholding}",
            wrong="the ranks made different states of the hook",
            way_out="give SparseState the same arguments on each",
        )
        self._gates: dict[tuple[int, int], DensityGate] = {}
        self._statistics: dict[tuple[int, int], BucketStatistics] = {}
        self._waiting: set[tuple[int, int]] = set()
        # A daemon: a rank that fails ends, also where it waits for ranks that are not coming.
        self._thread = BoundedExecutor("graphstash-reduce", workers=1, capacity=_UNLIMITED)
        finalize(self, self._thread.close)

    def close(self) -> None:
        """Ends the thread and the group; call it on every rank, after the training."""
        self._thread.close()
        if self._owns_group:
            distributed.destroy_process_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Begins the mean of a bucket over the ranks.

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
                self._thresholding.hold_back_(parameter, gradient, block_size=self._sums.block_size)
        gate = self._gates.setdefault(key, self._new_gate())
        if not gate.skips():
            return self._later(key, gradients, lambda: self._mean_of_blocks(bucket, key, gate))
        if self._dense is not None:  # to its end, in this thread: see above
            state, hook = self._dense
            self._count(key, Sent.whole(gradients, gradients.nbytes))
            return self._later(key, gradients, lambda: hook(state, bucket).wait())
        return self._later(key, gradients, lambda: self._mean_of_all(gradients, key))

    @property
    def holds_back(self) -> bool:
        """Whether small blocks wait for later steps."""
        return self._thresholding is not None

    def statistics(self) -> dict[str, Mapping[str, float]]:
        """For each bucket, as `<number>/<elements>`, what was sent since the beginning; see
        `BucketStatistics.report`.
        """
        return {
            f"{number}/{elements}": each.report()
            for (number, elements), each in sorted(self._statistics.items())
        }

    def scalars(self) -> dict[str, float]:
        """What was sent since the beginning, of all buckets, for curves; see
        `BucketStatistics.report`.
        """
        total = BucketStatistics()
        for each in self._statistics.values():
            total.add_all(each)
        return total.report()

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: what thresholding holds back. Every rank has to call it."""
        if self._thresholding is None:
            return {}
        return self._thresholding.state_dict(self._group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, of any number of ranks."""
        if self._thresholding is not None and state:
            self._thresholding.load_state_dict(state)

    def _mean_of_blocks(
        self, bucket: GradBucket, key: tuple[int, int], gate: DensityGate
    ) -> Tensor:
        if self._dense is not None and hasattr(self._dense[0], "maybe_increase_iter"):
            self._dense[0].maybe_increase_iter(bucket)  # PowerSGD counts steps by buckets
        gradients: Tensor = bucket.buffer()
        sent = self._sums.sum_(
            gradients,
            scale=1 / self._world,
            wire_dtype=self._wire_dtype,
            dense_above=gate.limit,
        )
        gate.saw(sent.union_density)
        self._count(key, sent)
        return gradients

    def _mean_of_all(self, gradients: Tensor, key: tuple[int, int]) -> Tensor:
        sent_bytes = self._sums.sum_whole_(gradients.div_(self._world), wire_dtype=self._wire_dtype)
        self._count(key, Sent.whole(gradients, sent_bytes))
        return gradients

    def _mean_of_rows(self, gradients: Tensor, key: tuple[int, int]) -> Tensor:
        """Of an embedding with `sparse=True`: rows are its blocks, and torch sends only these."""
        mean = (gradients / self._world).coalesce()
        own, indices, values = mean._nnz(), mean.indices().nbytes, mean.values().nbytes
        dense_bytes = mean.numel() * mean.itemsize
        began = time.perf_counter()
        distributed.all_reduce(mean, group=self._group)
        seconds, union = time.perf_counter() - began, mean.coalesce()._nnz()
        sent = Sent(len(mean), own, union, indices, values, dense_bytes, send_seconds=seconds)
        self._count(key, sent)
        return mean

    def _count(self, key: tuple[int, int], sent: Sent) -> None:
        self._statistics.setdefault(key, BucketStatistics()).add(sent)

    def _later(
        self, key: tuple[int, int], gradients: Tensor, work: Callable[[], Tensor]
    ) -> Future[Tensor]:
        """Does it in the thread. On CUDA its stream goes on where backward's is now, and backward's
        waits for it.
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
                    self._waiting.discard(key)  # before backward goes on, and a next one begins
                    done.set_result(mean)
            except Exception as error:  # noqa: BLE001 - DDP raises it where backward waits
                self._waiting.discard(key)
                done.set_exception(error)  # type: ignore[arg-type] # torch's annotation

        self._waiting.add(key)
        if not self._thread.submit(run):
            raise RuntimeError("this SparseState is closed, or no thread can be started")
        with suppress(RuntimeError):  # not in backward, but for a rank that has joined
            # Before DDP's own, which would say that it is "unable to cast" the error.
            Variable._execution_engine.queue_callback(done.wait)  # type: ignore[arg-type]
        return done


def _group_of_all() -> distributed.ProcessGroup:
    """One more group of all ranks, in which nobody else sends. It has the job's timeout: of itself
    it would wait torch's half hour for ranks that are not coming.
    """
    made = distributed.new_group(timeout=timeout_of(distributed.group.WORLD))
    assert isinstance(made, distributed.ProcessGroup)  # noqa: S101 - this rank is in it
    return made


def _name_of(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
