"""TorchStep and CudaGraphStep: the traced step on plain torch.

On a CPU the function goes through `torch.compile`, which splits it at `backward()`; forward,
backward and optimizer become a program each. torch.compile guards whatever Python value it took in,
so nothing has to be refused; only the compiler itself may be missing or fail.

On CUDA the whole step is captured as one CUDA graph
(https://pytorch.org/docs/2.7/notes/cuda.html#whole-network-capture). A captured graph runs no
Python and guards nothing; as on torch_xla there is one for each structure of a batch and of the
host's state, as far as `State` sees it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.device_state import State
from graphstash.training.traced.snapshot import Snapshot
from graphstash.training.traced.step import (
    STRUCTURES,
    TracedStep,
    UnsupportedBatchError,
    detached,
    flatten_batch,
)

__all__ = ["CudaGraphStep", "TorchStep", "plain_torch_step"]

R = TypeVar("R")

_WARM_UP: Final = 3  # steps before a capture, as torch recommends


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
        self.retrace()

    def retrace(self) -> None:
        """Forgets the compiled programs."""
        self.mode = "recording"
        self.reason = None
        self._refused = False
        self._begun = self._state.has_begun()
        self._seen: set[Hashable] = set()
        self._state.scan()
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
            return detached(self._compiled(*batch))
        self.mode = "recording"
        before = Snapshot(self._state)
        try:
            result = self._compiled(*batch)
        except Exception as error:  # noqa: BLE001 - the function's own will be raised again below
            before.restore()
            self._state.refresh()
            result = self._function(*batch)
            self._refuse(f"torch.compile failed: {_first_line(error)}")
        else:
            if len(self._seen) < STRUCTURES:
                self._seen.add(structure)
        return detached(result)


class CudaGraphStep(TracedStep[R]):
    """Captures the step as a CUDA graph. Written after torch's documentation; not run by our tests.

    Optimizers have to be capturable: those of graphstash.training are, torch.optim's with
    `capturable=True`. Nothing in the function may wait for the device: CUDA refuses to capture
    that, and then the step runs as it is.
    """

    def __init__(self, function: Callable[..., R], state: State, *, device: torch.device) -> None:
        super().__init__(function, state)
        self._device = device
        self.retrace()

    def retrace(self) -> None:
        """Forgets the graphs."""
        self.mode = "recording"
        self.reason = None
        self._refused = False
        self._state.scan()
        self._steps: dict[Hashable, int] = {}
        self._captures: dict[Hashable, _Capture] = {}
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, *batch: Any) -> R:
        """Runs one step."""
        self._state.refresh()
        if self._refused:
            return detached(self._function(*batch))
        try:
            tensors, layout = flatten_batch(batch)
        except UnsupportedBatchError as why:
            self._refuse(str(why))
            return detached(self._function(*batch))
        structure = (layout, self._state.structure(), self._state.values())
        capture = self._captures.get(structure)
        if capture is None:
            if structure not in self._steps and len(self._steps) >= STRUCTURES:
                self._be_lazy(
                    f"batches and the host's state have come in more than {STRUCTURES} structures; "
                    "pad batches, and let graphstash.training's optimizers hold what is scheduled"
                )
                return self._warm_up(batch)
            self.mode = "recording"
            done = self._steps[structure] = self._steps.get(structure, 0) + 1
            if done <= _WARM_UP:
                return self._warm_up(batch)
            try:
                capture = _Capture(self._function, batch, tensors)
            except RuntimeError as error:  # nothing was executed: a capture only records
                self._refuse(f"CUDA graph capture failed: {_first_line(error)}")
                return detached(self._function(*batch))
            self._captures[structure] = capture
        self.mode = "traced"
        result: R = capture(tensors)
        return result

    def _warm_up(self, batch: Sequence[Any]) -> R:
        """An ordinary step, on a stream of its own as capturing wants it."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = detached(self._function(*batch))
        current.wait_stream(self._side)
        return result


class _Capture:
    """One captured step with the memory that it reads batches from and writes results to."""

    def __init__(
        self, function: Callable[..., Any], batch: Sequence[Any], tensors: Sequence[Tensor]
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        leaves, nesting = pytree.tree_flatten(tuple(batch))
        static = iter(self._inputs)
        leaves = [next(static) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._graph = torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(self._graph):
            self._result = detached(function(*pytree.tree_unflatten(leaves, nesting)))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()  # type: ignore[no-untyped-call]
        return pytree.tree_map_only(Tensor, torch.clone, self._result)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
