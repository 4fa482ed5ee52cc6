"""Buckets: update parameters as soon as DistributedDataParallel has reduced their bucket.

DDP sums each bucket of gradients over all processes as soon as backward has filled it. The thread
that receives the sum updates the bucket's parameters while backward fills the next buckets.

DDP cannot remove a communication hook. After the fusion, the hook reduces as DDP would without it.
The last bit may differ: DDP divides sparse gradients and bucket views by the number of processes,
and the hook multiplies by the inverse.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from graphstash.training.fusion.parameters import FusionError
from graphstash.training.lent import Lent

__all__ = ["Buckets"]

_REMEDY: Final = 'use when="forward", or train without fusion'


class Buckets:
    """The buckets of one DDP.

    Args:
        ddp: the module whose gradients are reduced.
        updater: method, called with each full bucket during backward. Returns None, or a function
            that takes the mean gradient of each parameter (None: no process has one) and updates
            the parameters. Held weakly.
        is_used: method that returns whether backward in this process has given a parameter a
            gradient. Held weakly.

    Raises:
        FusionError: DDP has another communication hook, or reduces some gradients outside buckets.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        updater: Callable[[GradBucket], Callable[[Sequence[Tensor | None]], None] | None],
        is_used: Callable[[Tensor], bool],
    ) -> None:
        if ddp._delay_all_reduce_params:
            raise FusionError(
                "DistributedDataParallel(delay_all_reduce_named_params=) reduces gradients outside "
                f"of the buckets; {_REMEDY}"
            )
        self.parameters = [
            parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        ]
        state = _state_of(ddp)
        if state is None:
            state = _State(ddp)
            try:
                ddp.register_comm_hook(state, _reduce)
            except RuntimeError as error:  # DDP has one of torch's C++ hooks
                raise _other_hook() from error
        state.updater = weakref.WeakMethod(updater)
        state.is_used = weakref.WeakMethod(is_used)
        self._state = state

    def remove(self) -> None:
        """Stop updating: the hook only reduces, as DDP does."""
        self._state.updater = _no_owner


def _no_owner() -> None:
    """Return None, as a dead weak reference does."""


class _State:
    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        self.updater: Callable[[], Any] = _no_owner
        self.is_used: Callable[[], Any] = _no_owner


def _state_of(ddp: DistributedDataParallel) -> _State | None:
    for _, state in ddp._comm_hooks:
        if isinstance(state, _State):
            return state
        raise _other_hook()
    return None


def _other_hook() -> FusionError:
    return FusionError(
        "DistributedDataParallel has a communication hook, which decides what becomes of the "
        f"gradients, and takes only one; {_REMEDY}"
    )


def _divisor(ddp: DistributedDataParallel, device: torch.device) -> int:
    """Return the number of processes by which DDP divides a bucket without a hook."""
    group = ddp.process_group
    if not ddp._join_config.enable or ddp._divide_by_initial_world_size:
        return int(group.size())
    # A process that has joined calls the hook outside of backward, with zeros.
    is_active = torch._C._current_graph_task_id() != -1
    active = torch.tensor(int(is_active), device=device)
    with Lent(active):
        distributed.all_reduce(active, group=group)
    return int(active)


def _reduce(state: _State, bucket: GradBucket) -> Future[Tensor]:
    ddp = cast("DistributedDataParallel", state.ddp())  # alive: it calls this hook
    sums = bucket.buffer()
    group = ddp.process_group
    updater = state.updater()
    if updater is not None and (sums.is_sparse or ddp._join_config.enable):
        what = "a sparse gradient" if sums.is_sparse else "join()"
        raise FusionError(f"{what} of DistributedDataParallel cannot be fused; {_REMEDY}")
    sums.mul_(1.0 / _divisor(ddp, sums.device))  # before the sum, as DDP does
    work = distributed.all_reduce(sums, group=group, async_op=True)
    update = None if updater is None else updater(bucket)
    if update is None:
        return cast("Future[Tensor]", work.get_future().then(lambda done: done.value()[0]))
    futures = [work.get_future()]
    used = None
    if ddp.find_unused_parameters or ddp.static_graph:
        is_used = state.is_used()
        used = torch.tensor(
            [is_used(each) for each in bucket.parameters()], dtype=torch.int32, device=sums.device
        )
        most = distributed.ReduceOp.MAX
        futures.append(distributed.all_reduce(used, most, group, async_op=True).get_future())
    gradients = bucket.gradients()

    def apply(done: Future[list[Future[Any]]]) -> Tensor:
        for each in done.value():
            each.value()  # raises the reduction's error
        uses = [True] * len(gradients) if used is None else used.tolist()
        update([g if use else None for g, use in zip(gradients, uses, strict=True)])
        return sums

    return torch.futures.collect_all(futures).then(apply)
