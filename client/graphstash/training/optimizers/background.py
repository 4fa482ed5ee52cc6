"""Background: computes roots in a thread, and holds them until a parameter takes them.

The thread may read the device. What it raises is raised where the roots are taken; a matrix that
cannot be decomposed is no error, but an answer. Threads do not survive a fork: the child computes
from the same snapshots what its parent's thread had not finished.
"""

import os
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from graphstash.training.optimizers.factors import Factors
from graphstash.training.threads import DeviceFuture, ExecutorClosed, WorkerPool

__all__ = ["Background", "Compute", "Pending", "Roots", "Snapshot", "nothing_pending"]

_UNLIMITED: Final = 2**31
"""A parameter waits for one computation at a time, so the queue is no longer than the model."""


class Roots(NamedTuple):
    """What a computation gives; `flat` is None if it was not made, or has failed."""

    flat: Tensor | None = None
    """As `Factors` has them."""
    order: Tensor | None = None
    """Where the directions of new bases were in the old ones."""
    has_failed: bool = False


class Snapshot(NamedTuple):
    """What a computation reads; nobody changes it meanwhile."""

    factors: Factors
    statistics: Tensor
    roots: Tensor
    """The old ones."""
    is_first: bool
    """Whether there are no old ones yet."""
    found_inf: Tensor | None
    """[], of the step that the statistics are of."""


Compute = Callable[[Snapshot], Roots]


class _Kind(IntEnum):
    """What `Pending.plain` holds."""

    NONE = 0
    NOTHING = 1
    FAILED = 2
    ROOTS = 3
    SORTED = 4


class Pending:
    """Roots that a parameter waits for. Copied, pickled or saved, they are waited for first.

    Args:
        due: the call that is to use them.
        here: gives them without the thread.
        future: of the thread; None: only `here` is asked.
    """

    def __init__(
        self, due: int, here: Callable[[], Roots], future: DeviceFuture[Roots] | None = None
    ) -> None:
        self.due = due
        self._here = here
        self._future = future

    def is_here(self) -> bool:
        """Whether `roots` need not wait."""
        return self._future is None or self._future.done()

    def roots(self) -> Roots:
        """Waits for them; raises what computing them raised."""
        if self._future is None:
            return self._here()
        try:
            roots = self._future.result()
        except ExecutorClosed:  # the thread is the parent process's
            roots = self._here()
        self._here, self._future = partial(Roots, *roots), None
        return roots

    def plain(self, nothing: Tensor, calls: int) -> Tensor:
        """For a state dictionary: one tensor, whose shape says nothing of what is in it.

        A distributed checkpoint keeps neither what a new optimizer lacks nor another shape.

        Args:
            nothing: what `nothing_pending` gives.
            calls: the number of the last call.

        Returns:
            [2 + numel + rows]: a `_Kind`; in how many calls they are due; the roots; their order.
            Zeros stand for what there is not.
        """
        flat, order, has_failed = self.roots()
        kind = _Kind.FAILED if has_failed else _Kind.NOTHING
        if flat is not None:
            kind = _Kind.ROOTS if order is None else _Kind.SORTED
        head = nothing.new_tensor([kind, self.due - calls])
        there = [head, *(each.to(nothing) for each in (flat, order) if each is not None)]
        used = torch.cat(there)
        return torch.cat([used, nothing[len(used) :]])

    @classmethod
    def from_plain(cls, plain: Tensor, calls: int, factors: Factors) -> Self | None:
        """The contrary of `plain`; None if nothing is waited for."""
        kind, wait = (int(number) for number in plain[:2].tolist())
        if kind == _Kind.NONE:
            return None
        flat, order = torch.split(plain[2:].clone(), [factors.numel, factors.rows])
        roots = Roots(
            flat if kind in {_Kind.ROOTS, _Kind.SORTED} else None,
            order.long() if kind == _Kind.SORTED else None,
            kind == _Kind.FAILED,
        )
        return cls(calls + wait, partial(Roots, *roots))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.due, partial(Roots, *self.roots()))


def nothing_pending(factors: Factors, like: Tensor) -> Tensor:
    """`Pending.plain` of a parameter that waits for nothing."""
    return like.new_zeros(2 + factors.numel + factors.rows)


class Background:
    """A thread of this process, which begins with the first computation."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._pid = os.getpid()

    def submit(self, compute: Compute, snapshot: Snapshot, *, due: int) -> Pending:
        """Begins to compute."""
        if self._pool is None or self._pid != os.getpid():
            self._pool = WorkerPool("roots", workers=1, capacity=_UNLIMITED)
            self._pid = os.getpid()
        event = _recorded(snapshot.statistics.device)
        call = partial(_computed, compute, snapshot, event)
        return Pending(due, call, self._pool.submit(call))

    def close(self) -> None:
        """Waits for what is being computed, and ends the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _recorded(device: torch.device) -> "torch.cuda.Event | None":
    """Happens when the device has made the snapshot."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _computed(compute: Compute, snapshot: Snapshot, made: "torch.cuda.Event | None") -> Roots:
    with torch.no_grad():
        if made is None:
            return _finite(compute, snapshot)
        stream = torch.cuda.Stream(snapshot.statistics.device)
        with torch.cuda.stream(stream):
            stream.wait_event(made)
            roots = _finite(compute, snapshot)
            stream.synchronize()
            return roots


def _finite(compute: Compute, snapshot: Snapshot) -> Roots:
    """Computes nothing of a bad step, whose statistics are those of the step before."""
    if snapshot.found_inf is not None and bool(snapshot.found_inf != 0):
        return Roots()
    try:
        roots = compute(snapshot)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # torch does not list it
        return Roots(has_failed=True)
    is_finite = roots.flat is not None and bool(torch.isfinite(roots.flat).all())
    return roots if is_finite else Roots(has_failed=True)
