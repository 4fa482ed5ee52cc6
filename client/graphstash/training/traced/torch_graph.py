"""TorchStep and CudaGraphStep: the traced step on plain torch.

On a CPU the function goes through `torch.compile`, which splits it at `backward()`; forward,
backward and optimizer become one program each. torch.compile guards every Python value that it
used, so nothing has to be refused; only the compiler itself may be missing or fail.

On CUDA the whole step is captured as one CUDA graph
(https://pytorch.org/docs/2.7/notes/cuda.html#whole-network-capture). A captured graph runs no
Python and guards nothing; as on torch_xla there is one for each structure of a batch and of the
host's state, as far as `State` sees it.
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
    """Keeps a state with its gradients and the CPU's random state, for as long as the attempt.

    Args:
        state: of the step.
        values: copy what the tensors hold; not needed where nothing is executed.

    Raises:
        FusionError: updates are made elsewhere, by `fuse`.
    """

    def __init__(self, state: State, *, values: bool = True) -> None:
        require_unfused(state.parameters)
        self._grads = [(parameter, parameter.grad) for parameter in state.parameters]
        kept = [*state.tensors(), *(grad for _, grad in self._grads if grad is not None)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in kept] if values else []
        self._optimizers = [
            (optimizer, {parameter: dict(of) for parameter, of in optimizer.state.items()})
            for optimizer in state.optimizers
        ]
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back; tensors stay the same objects, new optimizer state is dropped."""
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
"""DDP rebuilds and times its buckets in the first ones (the same page)."""


def plain_torch_step(
    function: Callable[..., R], state: State, *, device: torch.device
) -> TracedStep[R]:
    """The form for a device of plain torch."""
    if device.type == "cuda":
        return CudaGraphStep(function, state, device=device)
    return TorchStep(function, state)


class TorchStep(TracedStep[R]):
    """Compiles the function; runs it as it is if that fails, from the state before the attempt."""

    def __init__(self, function: Callable[..., R], state: State) -> None:
        super().__init__(function, state)
        self._backward: Any = torch.compiler.disable(torch.autograd.backward)
        self.retrace()

    def retrace(self) -> None:
        """Forgets the compiled programs."""
        self._restart()
        self._begun = self._state.has_begun()
        self._seen: set[Hashable] = set()
        self._compiled: Callable[..., R] = torch.compile(self._function)

    def __call__(self, *batch: Any) -> R:
        """Runs one step."""
        self._state.refresh()
        if self._refused or not self._begun:
            self._begun = True  # the first step makes what later ones find: not to be compiled
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
        except Exception as error:  # noqa: BLE001 - the function's own will be raised again below
            before.restore()
            self._state.refresh()
            result = self._function(*batch)
            self._refuse(f"torch.compile failed: {_cause(error)}")
        else:
            if len(self._seen) < STRUCTURES:
                self._seen.add(structure)
        return detached(result)

    def _run(self, *batch: Any) -> R:
        """Runs the compiled step, whose backward is compiled already, and not to be traced again.

        torch.compile leaves the function at `backward()`, and would then trace whatever Python runs
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

    Written after torch's documentation, and tested with a double on a CPU that keeps CUDA's rules;
    it has not run on a GPU.

    Optimizers have to be capturable: those of graphstash.training are, and compute every step by
    their formula here, captured or not, so that a run that resumes makes the same bits. Those of
    torch.optim are with `capturable=True`. Nothing in the function may wait for the device: CUDA
    refuses to capture that, and then the step runs as it is. DDP has to be made on a side stream:
    `train(traced=True)` does so.
    """

    def __init__(self, function: Callable[..., R], state: State, *, device: torch.device) -> None:
        super().__init__(function, state)
        self._device = device
        self.retrace()

    def retrace(self) -> None:
        """Forgets the graphs."""
        self._restart()
        self._steps: dict[Hashable, int] = {}
        self._captures: dict[Hashable, _Capture] = {}
        self._side = torch.cuda.Stream(self._device)
        # One graph runs at a time, so all can have their memory in one place.
        self._pool = torch.cuda.graph_pool_handle()
        in_ddp = distributed.is_available() and distributed.is_initialized()
        self._warm_up_steps = _WARM_UP_OF_DDP if in_ddp else _WARM_UP

    def __call__(self, *batch: Any) -> R:
        """Runs one step."""
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
                self._be_lazy(
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
            except Exception as error:  # noqa: BLE001 - the function's own will be raised again below
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
        """An ordinary step, on a stream of its own as capturing wants it."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = self._run(*batch)
        current.wait_stream(self._side)
        return result


class _Capture:
    """One captured step with the memory that it reads batches from and writes results to."""

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
        # Threads that upload batches use CUDA meanwhile; only this one's calls can spoil a capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = function(*pytree.tree_unflatten(leaves, nesting))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self._result)


def _cause(error: Exception) -> str:
    """What was raised first, on one line: torch wraps it, and begins with its own name."""
    cause = getattr(error, "inner_exception", None) or error
    text = " ".join(str(cause).split("\n\n")[0].split())
    return f"{type(cause).__name__}: {text[:_CAUSE_LENGTH]}"
