"""TorchStep and CudaGraphStep: the traced step on plain torch.

On a CPU, `torch.compile` compiles forward, backward and optimizer to one program each. It guards
the Python values that the function uses. Steps run uncompiled if the compiler fails, after a change
that it does not guard (`State.unguarded`), and before the optimizers have state.

On CUDA, the whole step is captured as one CUDA graph
(https://pytorch.org/docs/2.7/notes/cuda.html#whole-network-capture). A captured graph runs no
Python and has no guards. There is one graph for each structure of the batch and each host state
that `State` detects. A graph keeps all other Python values of its capture. `comparison` looks for
those that change with every step.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from graphstash.training.device import formula_only
from graphstash.training.fusion.base import require_unfused
from graphstash.training.traced.capture import capturing
from graphstash.training.traced.comparison import Comparison, compared
from graphstash.training.traced.outside import NO_CHANGES, Outside
from graphstash.training.traced.referents import Referents
from graphstash.training.traced.state import State
from graphstash.training.traced.step import (
    STRUCTURES,
    TracedStep,
    UnsupportedBatchError,
    detached,
    flatten_batch,
)

__all__ = ["CudaGraphStep", "TorchStep"]


class Snapshot:
    """A copy of state, gradients and the CPU's random state, to undo a failed attempt. With
    `values=False`, it has no values of tensors, which a CUDA graph capture does not change.

    Raises:
        FusionError: `fuse` has moved the updates out of the optimizer.
    """

    def __init__(self, state: State, *, values: bool = True) -> None:
        require_unfused(state.parameters)
        self._grads = [(parameter, parameter.grad) for parameter in state.parameters]
        kept = [*state.tensors(), *(grad for _, grad in self._grads if grad is not None)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in kept] if values else []
        self._optimizers = [
            (optimizer, {parameter: dict(values) for parameter, values in optimizer.state.items()})
            for optimizer in state.optimizers
        ]
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state in the same tensor objects. Drop new optimizer state."""
        for tensor, value in self._values:
            tensor.copy_(value)
        for parameter, gradient in self._grads:
            parameter.grad = gradient
        for optimizer, states in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(states)
        torch.set_rng_state(self._random)


R = TypeVar("R")

_CAUSE_LENGTH: Final = 500

_WARM_UP: Final = 3
"""Ordinary steps before a capture, as torch recommends."""

_WARM_UP_OF_DDP: Final = 11
"""The same under torch.distributed, because torch's page requires 11 steps for DDP."""


_unguarded: WeakKeyDictionary[object, Hashable] = WeakKeyDictionary()
"""By code object, for which torch keeps programs: `State.unguarded` when it was first compiled."""

_CHANGED: Final = (
    "torch.compile does not notice that a module has got its first hook or lost its last one, or "
    "that weights are tied or untied; call retrace() on the step to compile it for the present ones"
)


class _UnrepeatableError(Exception):
    """A graph would not repeat an effect of the function. The message names it."""


def _discard_programs() -> None:
    torch._dynamo.reset()
    _unguarded.clear()


class TorchStep(TracedStep[R]):
    """Compiles the function. If that fails, restores the state and runs all steps uncompiled."""

    def __init__(self, function: Callable[..., R], state: State) -> None:
        super().__init__(function, state)
        self._backward: Any = torch.compiler.disable(torch.autograd.backward)
        self._code: object = getattr(function, "__code__", type(function))
        self._begin()

    def retrace(self) -> None:
        """Discard all programs that `torch.compile` has made in this process."""
        _discard_programs()
        self._begin()

    def _begin(self) -> None:
        self._restart()
        self._begun = self._state.has_begun()
        self._seen: set[Hashable] = set()
        self._compiled: Callable[..., R] = torch.compile(self._function)

    def __call__(self, *batch: Any) -> R:
        """Run one step."""
        self._state.refresh()
        if self._refused or not self._begun:
            self._begun = True  # uncompiled: this step creates the optimizers' state
            return detached(self._function(*batch))
        if not self._fits_the_state():
            self._fall_back(_CHANGED)
            return detached(self._function(*batch))
        self.reason = None
        try:
            structure: Hashable = (flatten_batch(batch)[1], self._state.structure())
        except UnsupportedBatchError:
            structure = None  # torch.compile guards it
        if structure in self._seen:
            self.mode = "traced"
            return detached(self._run(*batch))
        self.mode = "recording"
        before = Snapshot(self._state)
        outside = Outside(self._function, self._state)
        try:
            result = self._run(*batch)
        except Exception as error:
            written, replaced = outside.changes().names
            if changed := sorted(written | replaced):
                if not type(error).__module__.startswith("torch."):
                    raise  # the function's own error
                raise RuntimeError(
                    f"torch.compile failed after the step had changed {', '.join(changed)}, which "
                    "is not in `state`: the step cannot be made again; put it into `state`"
                ) from error
            before.restore()
            self._state.refresh()
            result = self._function(*batch)
            self._refuse(f"torch.compile failed: {_cause(error)}")
        else:
            if len(self._seen) < STRUCTURES:
                self._seen.add(structure)
        return detached(result)

    def _fits_the_state(self) -> bool:
        """Return whether the programs, if any, were compiled for the present `State.unguarded`.
        Discard the programs of another step with the same function and another model.
        """
        unguarded = self._state.unguarded()
        if _unguarded.setdefault(self._code, unguarded) == unguarded:
            return True
        if self._seen:
            return False
        _discard_programs()
        _unguarded[self._code] = unguarded
        return True

    def _run(self, *batch: Any) -> R:
        """Run the compiled step, and exclude `backward()` from tracing. torch.compile breaks the
        graph there, and would then trace the code that Inductor generated for it.
        """
        original = torch.autograd.backward
        torch.autograd.backward = self._backward
        try:
            return self._compiled(*batch)
        finally:
            torch.autograd.backward = original


class CudaGraphStep(TracedStep[R]):
    """Captures the step as a CUDA graph. A job of one process compares the graph once with the
    function.

    Optimizers must be capturable: those of graphstash.training, or those of torch.optim with
    `capturable=True`. Here the former never use fused kernels, captured or not, so that a resumed
    run gives the same bits. If the function waits for the device, CUDA refuses the capture, and
    all steps run uncaptured. Create DDP on a side stream, as `train(traced=True)` does.
    """

    def __init__(self, function: Callable[..., R], state: State, *, device: torch.device) -> None:
        super().__init__(function, state)
        self._device = device
        self.retrace()

    def retrace(self) -> None:
        """Discard the graphs."""
        self._restart()
        self._steps: dict[Hashable, int] = {}
        self._captures: dict[Hashable, _Capture] = {}
        self._side = torch.cuda.Stream(self._device)
        # Only one graph runs at a time, so all graphs can share memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._warm_up_steps = _WARM_UP_OF_DDP if _process_count() else _WARM_UP

    def __call__(self, *batch: Any) -> R:
        """Run one step."""
        self._state.refresh()
        flat = None if self._refused else self._flatten(batch)
        if flat is None:
            return self._run(*batch)
        tensors, layout = flat
        structure = (
            layout,
            self._state.structure(),
            self._state.hooks(),
            self._state.values(),
        )
        capture = self._captures.get(structure)
        if capture is None:
            return self._record(structure, batch, tensors)
        # A comparison would repeat the step's collectives, and other ranks might not repeat them.
        if not capture.is_compared and _process_count() <= 1:
            made = self._compare(capture, batch, tensors)
            if made.reason is not None:
                del capture
                self._captures.clear()  # first, because their memory may be needed
                self._refuse(made.reason)
                return cast("R", made.result) if made.is_made else self._run(*batch)
            capture.is_compared = True
            if made.is_made:
                return cast("R", made.result)
        self.mode = "traced"
        self._has_run = True
        result: R = capture(tensors)
        return result

    def _flatten(self, batch: Sequence[Any]) -> tuple[list[Tensor], Hashable] | None:
        """Return the tensors of a batch and its layout. None if this step runs without a graph."""
        try:
            tensors, layout = flatten_batch(batch)
        except UnsupportedBatchError as why:
            self._refuse(str(why))
            return None
        if any(tensor.device.type != self._device.type for tensor in tensors):
            self._fall_back(
                "a tensor of the batch is on the host; move it to the device before the step"
            )
            return None
        if self._is_replaced():
            self._captures.clear()
            self._steps.clear()
        return None if self._refused else (tensors, layout)

    def _compare(
        self, capture: "_Capture", batch: Sequence[Any], tensors: list[Tensor]
    ) -> Comparison[R]:
        self.mode = "recording"
        return compared(
            lambda: self._warm_up(batch),
            lambda: capture(tensors),
            self._state,
            self._device,
            outside=lambda: Outside(self._function, self._state),
            changes=capture.changes,
        )

    def _record(self, structure: Hashable, batch: Sequence[Any], tensors: list[Tensor]) -> R:
        """Run an ordinary step or, after some of them, capture the step and run its graph."""
        if structure not in self._steps and len(self._steps) >= STRUCTURES:
            self._fall_back(
                f"batches and the host's state have more than {STRUCTURES} structures; pad "
                "batches, and use the optimizers of graphstash.training for scheduled values"
            )
            return self._warm_up(batch)
        self.mode = "recording"
        done = self._steps[structure] = self._steps.get(structure, 0) + 1
        if done <= self._warm_up_steps:
            return self._warm_up(batch)
        before = Snapshot(self._state, values=False)  # a capture only records
        if self._referents is None or not self._captures:
            self._referents = Referents(self._state, self._device, has_addresses=True)
        referents = self._referents
        outside = Outside(self._function, self._state)
        changes = NO_CHANGES

        def recorded(*batch: Any) -> Any:
            nonlocal changes
            result = self._run(*batch)
            changes = outside.changes()
            return result

        try:
            with_pool = partial(capturing, pool=self._pool, stream=self._side)
            capture = _Capture(recorded, batch, tensors, with_pool, self._state.parameters)
            if not referents.are_of(self._state):
                raise _UnrepeatableError(  # noqa: TRY301 - a capture with this effect has failed
                    f"the function replaces {referents.changed_in(self._state) or 'its state'}, "
                    "or changes it on the host, which a CUDA graph cannot repeat; write in place, "
                    "on the device (torch.optim: capturable=True)"
                )
        except Exception as error:  # noqa: BLE001 - the function's own error is raised again below
            outside.restore_places()  # a failed capture leaves tensors without values
            before.restore()
            referents.restore_host()
            self._state.refresh()
            self._captures.clear()
            self._refuse(f"CUDA graph capture failed: {_cause(error)}")
        if self._refused:  # now, because the error's traceback held the tensors of the capture
            return self._run(*batch)
        capture.changes = changes
        capture.outside = outside.tensors()
        self._captures[structure] = capture
        self.mode = "traced"
        result: R = capture(tensors)
        return result

    def _run(self, *batch: Any) -> R:
        token = formula_only.set(True)
        try:
            return detached(self._function(*batch))
        finally:
            formula_only.reset(token)

    def _warm_up(self, batch: Sequence[Any]) -> R:
        """Run an ordinary step on a side stream, which torch requires before a capture."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = self._run(*batch)
        current.wait_stream(self._side)
        return result


class _Capture:
    """One captured step, with its static inputs and results. `changes` has what the capture did to
    tensors outside of the state. `outside` has those tensors, whose memory the graph reads.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        batch: Sequence[Any],
        tensors: Sequence[Tensor],
        capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]],
        parameters: Sequence[Tensor],
    ) -> None:
        self.is_compared = False
        self.changes = NO_CHANGES
        self.outside: Sequence[Tensor] = ()
        before = [parameter.grad for parameter in parameters]
        self._inputs = [tensor.clone() for tensor in tensors]
        leaves, nesting = pytree.tree_flatten(tuple(batch))
        static = iter(self._inputs)
        leaves = [next(static) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._graph = torch.cuda.CUDAGraph()
        cause: Exception | None = None
        try:
            with capturing(self._graph):
                try:
                    self._result = function(*pytree.tree_unflatten(leaves, nesting))
                except Exception as error:
                    cause = error
                    raise
        except Exception:
            if cause is not None:  # CUDA raises another error when an invalid capture ends
                raise cause from None
            raise
        grads = [parameter.grad for parameter in parameters]
        has_grads = any(grad is not None for grad in (*before, *grads))
        self._grads = list(zip(parameters, grads, strict=True)) if has_grads else []

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if tensors:
            torch._foreach_copy_(self._inputs, list(tensors))
        for parameter, own in self._grads:  # another graph or step may have left others
            if own is not None and parameter.grad is not None and parameter.grad is not own:
                own.copy_(parameter.grad)
        self._graph.replay()
        for parameter, own in self._grads:
            parameter.grad = own
        return pytree.tree_map_only(Tensor, torch.clone, self._result)


def _process_count() -> int:
    """Return the number of processes of torch.distributed, or 0 without it."""
    is_used = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_used else 0


def _cause(error: Exception) -> str:
    if isinstance(error, _UnrepeatableError):
        return str(error)
    cause = getattr(error, "inner_exception", None) or error
    text = " ".join(str(cause).split("\n\n")[0].split())
    return f"{type(cause).__name__}: {text[:_CAUSE_LENGTH]}"
