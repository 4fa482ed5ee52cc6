"""TorchStep and CudaGraphStep: the traced step on plain torch.

On a CPU, `torch.compile` compiles the function and splits it at `backward()`. Forward, backward and
optimizer become one program each. torch.compile guards every Python value that it used, so no step
is refused, unless the compiler is missing or fails.

On CUDA, the whole step is captured as one CUDA graph
(https://pytorch.org/docs/2.7/notes/cuda.html#whole-network-capture). A captured graph runs no
Python and guards nothing. As on torch_xla, there is one graph for each structure of a batch and of
the host's state, as far as `State` detects it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from graphstash.training.device import formula_only
from graphstash.training.fusion.base import require_unfused
from graphstash.training.traced.step import (
    STRUCTURES,
    State,
    TracedStep,
    UnsupportedBatchError,
    detached,
    flatten_batch,
)

__all__ = ["plain_torch_step"]


class Snapshot:
    """A copy of a state, its gradients and the CPU's random state, while an attempt runs.

    Args:
        state: State of the step.
        values: Whether to copy the tensors' values; not needed if nothing is executed.

    Raises:
        FusionError: `fuse` makes the updates outside of the optimizer.
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
        """Restore everything. Tensors stay the same objects; new optimizer state is dropped."""
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
"""Steps before a capture, as torch recommends."""

_WARM_UP_OF_DDP: Final = 11
"""DDP rebuilds and times its buckets in the first steps (the page above)."""


def plain_torch_step(
    function: Callable[..., R], state: State, *, device: torch.device
) -> TracedStep[R]:
    """Return the implementation for a device of plain torch."""
    if device.type == "cuda":
        return CudaGraphStep(function, state, device=device)
    return TorchStep(function, state)


class TorchStep(TracedStep[R]):
    """Compiles the function. If that fails, restores the state and runs the function uncompiled."""

    def __init__(self, function: Callable[..., R], state: State) -> None:
        super().__init__(function, state)
        self._backward: Any = torch.compiler.disable(torch.autograd.backward)
        self.retrace()

    def retrace(self) -> None:
        """Forget the compiled programs."""
        self._restart()
        self._begun = self._state.has_begun()
        self._seen: set[Hashable] = set()
        self._compiled: Callable[..., R] = torch.compile(self._function)

    def __call__(self, *batch: Any) -> R:
        """Run one step."""
        self._state.refresh()
        if self._refused or not self._begun:
            self._begun = True  # do not compile this step: it creates the state of later steps
            return detached(self._function(*batch))
        try:
            structure: Hashable = (flatten_batch(batch)[1], self._state.structure())
        except UnsupportedBatchError:
            structure = None  # torch.compile guards it
        if structure in self._seen:
            self.mode = "traced"
            return detached(self._run(*batch))
        self.mode = "recording"
        before = Snapshot(self._state)
        try:
            result = self._run(*batch)
        except Exception as error:  # noqa: BLE001 - the function's own error is raised again below
            before.restore()
            self._state.refresh()
            result = self._function(*batch)
            self._refuse(f"torch.compile failed: {_cause(error)}")
        else:
            if len(self._seen) < STRUCTURES:
                self._seen.add(structure)
        return detached(result)

    def _run(self, *batch: Any) -> R:
        """Run the compiled step, with a backward that torch.compile does not trace again.

        torch.compile leaves the function at `backward()`. It would then trace the Python that runs
        there: the code that Inductor has generated.
        """
        original = torch.autograd.backward
        torch.autograd.backward = self._backward
        try:
            return self._compiled(*batch)
        finally:
            torch.autograd.backward = original


class CudaGraphStep(TracedStep[R]):
    """Captures the step as a CUDA graph.

    Written after torch's documentation, and tested on a CPU with a double that follows CUDA's
    rules. It has not run on a GPU.

    Optimizers have to be capturable. Those of graphstash.training are, and always compute by their
    formula here, captured or not, so that a resumed run gives the same bits. Those of torch.optim
    are with `capturable=True`. The function must not wait for the device: CUDA refuses to capture
    that, and the step then runs uncaptured. DDP has to be created on a side stream;
    `train(traced=True)` does so.
    """

    def __init__(self, function: Callable[..., R], state: State, *, device: torch.device) -> None:
        super().__init__(function, state)
        self._device = device
        self.retrace()

    def retrace(self) -> None:
        """Forget the graphs."""
        self._restart()
        self._steps: dict[Hashable, int] = {}
        self._captures: dict[Hashable, _Capture] = {}
        self._side = torch.cuda.Stream(self._device)
        # Only one graph runs at a time, so all graphs can share memory.
        self._pool = torch.cuda.graph_pool_handle()
        in_ddp = distributed.is_available() and distributed.is_initialized()
        self._warm_up_steps = _WARM_UP_OF_DDP if in_ddp else _WARM_UP

    def __call__(self, *batch: Any) -> R:
        """Run one step."""
        self._state.refresh()
        if self._refused:
            return self._run(*batch)
        try:
            tensors, layout = flatten_batch(batch)
        except UnsupportedBatchError as why:
            self._refuse(str(why))
            return self._run(*batch)
        structure = (layout, self._state.structure(), self._state.values())
        capture = self._captures.get(structure)
        if capture is None:
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
            try:
                capture = _Capture(self._run, batch, tensors, self._pool)
            except Exception as error:  # noqa: BLE001 - the function's own error is raised again below
                before.restore()
                self._state.refresh()
                self._refuse(f"CUDA graph capture failed: {_cause(error)}")
                return self._run(*batch)
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
        """Run an ordinary step on a side stream, as capturing requires."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = self._run(*batch)
        current.wait_stream(self._side)
        return result


class _Capture:
    """One captured step, with its memory for batches and results."""

    def __init__(
        self,
        function: Callable[..., Any],
        batch: Sequence[Any],
        tensors: Sequence[Tensor],
        pool: Any,
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        leaves, nesting = pytree.tree_flatten(tuple(batch))
        static = iter(self._inputs)
        leaves = [next(static) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads use CUDA to upload batches. Only this thread may invalidate the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = function(*pytree.tree_unflatten(leaves, nesting))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self._result)


def _cause(error: Exception) -> str:
    """Return the original error on one line. torch wraps it and puts its own name first."""
    cause = getattr(error, "inner_exception", None) or error
    text = " ".join(str(cause).split("\n\n")[0].split())
    return f"{type(cause).__name__}: {text[:_CAUSE_LENGTH]}"
