"""Background: computes roots in a thread, and holds them until a parameter uses them.

The thread may read the device. `Pending.roots` raises the thread's error. A matrix that cannot be
decomposed is not an error: the result has `has_failed`. Threads do not survive a fork, so the child
recomputes unfinished roots from the same snapshots.
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
"""Queue capacity, never reached: each parameter has at most one pending computation."""


class Roots(NamedTuple):
    """The result of a computation. `flat` is None after a bad step or a failure."""

    flat: Tensor | None = None
    """Flat matrices, see `Factors`."""
    order: Tensor | None = None
    """Positions of the new bases' directions in the old bases."""
    has_failed: bool = False


class Snapshot(NamedTuple):
    """The inputs of a computation; they do not change while it runs."""

    factors: Factors
    statistics: Tensor
    roots: Tensor
    """The old roots."""
    is_first: bool
    """Whether there are no old roots yet."""
    found_inf: Tensor | None
    """[], of the step after which the snapshot was made."""


Compute = Callable[[Snapshot], Roots]


class _Result(IntEnum):
    NONE = 0
    NOTHING = 1
    FAILED = 2
    ROOTS = 3
    SORTED = 4


class Pending:
    """Roots that a parameter will use. Copying, pickling and saving wait for the computation.

    Args:
        due: Number of the parameter's call that has to use the roots.
        here: Returns the roots, computed in the calling thread.
        future: Result of the thread. None: call `here`.
    """

    def __init__(
        self, due: int, here: Callable[[], Roots], future: DeviceFuture[Roots] | None = None
    ) -> None:
        self.due = due
        self._here = here
        self._future = future

    def is_here(self) -> bool:
        """Whether `roots` does not wait for the thread."""
        return self._future is None or self._future.done()

    def roots(self) -> Roots:
        """Wait for the roots and return them, or raise what the computation raised."""
        if self._future is None:
            return self._here()
        try:
            roots = self._future.result()
        except ExecutorClosed:  # the thread belongs to the parent process
            roots = self._here()
        self._here, self._future = partial(Roots, *roots), None
        return roots

    def plain(self, nothing: Tensor, calls: int) -> Tensor:
        """Return one tensor for a state dictionary, in a shape that is independent of its content.

        A distributed checkpoint drops entries that a new optimizer lacks or has in another shape.

        Args:
            nothing: Result of `nothing_pending`.
            calls: Number of the parameter's last call.

        Returns:
            [2 + numel + rows]: a `_Result`; calls until the roots are due; the roots; their order.
                Missing parts are zeros.
        """
        flat, order, has_failed = self.roots()
        kind = _Result.FAILED if has_failed else _Result.NOTHING
        if flat is not None:
            kind = _Result.ROOTS if order is None else _Result.SORTED
        head = nothing.new_tensor([kind, self.due - calls])
        present = [head, *(each.to(nothing) for each in (flat, order) if each is not None)]
        used = torch.cat(present)
        return torch.cat([used, nothing[len(used) :]])

    @classmethod
    def from_plain(cls, plain: Tensor, calls: int, factors: Factors) -> Self | None:
        """Return the inverse of `plain`; None if no roots are pending."""
        kind, wait = (int(number) for number in plain[:2].tolist())
        if kind == _Result.NONE:
            return None
        flat, order = torch.split(plain[2:].clone(), [factors.numel, factors.rows])
        roots = Roots(
            flat if kind in {_Result.ROOTS, _Result.SORTED} else None,
            order.long() if kind == _Result.SORTED else None,
            kind == _Result.FAILED,
        )
        return cls(calls + wait, partial(Roots, *roots))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.due, partial(Roots, *self.roots()))


def nothing_pending(factors: Factors, like: Tensor) -> Tensor:
    """Return `Pending.plain` of a parameter without pending roots."""
    return like.new_zeros(2 + factors.numel + factors.rows)


class Background:
    """A thread of this process, started by the first computation."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._pid = os.getpid()

    def submit(self, compute: Compute, snapshot: Snapshot, *, due: int) -> Pending:
        """Begin a computation."""
        if self._pool is None or self._pid != os.getpid():
            self._pool = WorkerPool("roots", capacity=_UNLIMITED)
            self._pid = os.getpid()
        event = _record_snapshot(snapshot.statistics.device)
        call = partial(_compute_after, compute, snapshot, event)
        return Pending(due, call, self._pool.submit(call))

    def close(self) -> None:
        """Wait for running computations, and end the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _record_snapshot(device: torch.device) -> "torch.cuda.Event | None":
    """Return a CUDA event that completes after the device has made the snapshot."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _compute_after(compute: Compute, snapshot: Snapshot, made: "torch.cuda.Event | None") -> Roots:
    # Fusion arms tensors of the state to notice other users. This thread is the optimizer's own.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if made is None:
            return _compute_finite(compute, snapshot)
        stream = torch.cuda.Stream(snapshot.statistics.device)
        with torch.cuda.stream(stream):
            stream.wait_event(made)
            roots = _compute_finite(compute, snapshot)
            stream.synchronize()
            return roots


def _compute_finite(compute: Compute, snapshot: Snapshot) -> Roots:
    """Return the roots. Return none for a bad step, which did not change the statistics."""
    if snapshot.found_inf is not None and bool(snapshot.found_inf != 0):
        return Roots()
    try:
        roots = compute(snapshot)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # torch does not list it
        return Roots(has_failed=True)
    is_finite = roots.flat is not None and bool(torch.isfinite(roots.flat).all())
    return roots if is_finite else Roots(has_failed=True)
