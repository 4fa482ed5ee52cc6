"""XlaStep: the traced step on torch_xla. It decides when to record, to run a graph, and to refuse.

A first step that creates the optimizer's state cannot be recorded, and runs as usual. The next two
are recorded. If they are the same graph over the same arguments, every later step runs that graph
(`Program`). Two graphs are therefore compiled, as without tracing.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch_xla
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.traced import bindings
from graphstash.training.traced.bindings import XLA, Ownership, Seeds, unusable
from graphstash.training.traced.recorder import CannotFreezeError, Record, Recorder, difference
from graphstash.training.traced.referents import Referents
from graphstash.training.traced.state import State
from graphstash.training.traced.step import (
    STRUCTURES,
    TracedStep,
    UnsupportedBatchError,
    detached,
    flatten_batch,
)

__all__ = ["XlaStep"]


class Program:
    """Runs a recorded step on new batches and on the current state.

    The host does little else in a traced step, so the constructor computes as much as possible.
    `tensors` are `Recorder.tensors`. `values` are `State.values`, which the caller compares before
    each step. Without `ownership`, no buffers are donated.
    """

    def __init__(
        self,
        record: Record,
        *,
        device: str,
        state: State,
        tensors: Sequence[Tensor],
        values: Hashable,
        ownership: Ownership | None,
    ) -> None:
        self.values = values
        self._ownership = ownership
        self._record = record
        self._device = device
        self._seeds = Seeds(device)
        self._parameters = state.parameters
        self._tensors = tensors
        places = list(enumerate(record.arguments))
        self._arguments: list[Any] = [
            tensors[index] if kind == "state" else value
            for (kind, index), value in zip(record.arguments, record.values, strict=True)
        ]
        self._from_batch = [(at, index) for at, (kind, index) in places if kind == "batch"]
        self._from_grads = [(at, index) for at, (kind, index) in places if kind == "grad"]
        self._seed_at = next((at for at, (kind, _) in places if kind == "seed"), None)
        self._state_targets = [tensors[i] for kind, i in record.targets if kind == "state"]
        self._grad_targets = [i for kind, i in record.targets if kind == "grad"]

    def __call__(self, batch: Sequence[Tensor]) -> Any:
        """Run the step on the batch's tensors."""
        parameters = self._parameters
        arguments = self._arguments.copy()
        for at, index in self._from_batch:
            arguments[at] = batch[index]
        for at, index in self._from_grads:
            arguments[at] = parameters[index].grad
        seeds = self._seeds
        if self._seed_at is None:
            seeds.skip()
        else:
            arguments[self._seed_at] = seeds.take()
        # Checking a tensor applies changes made through its aliases. Then compute everything
        # recorded since the last step, which may need values that this step overwrites.
        XLA._check_tensor_need_materialization(arguments)
        XLA._xla_sync_live_tensors(self._device, [], wait=False)
        targets = self._state_targets
        if self._ownership is not None:
            self._ownership.ensure(targets, self._device)
        if self._grad_targets:
            targets = targets + [parameters[i].grad for i in self._grad_targets]
        with bindings.without_functionalization():
            outputs = XLA._run_cached_graph(self._record.graph, arguments)
            bindings.write(targets, outputs[: len(targets)])
        seeds.advance()
        for index in self._record.cleared:
            parameters[index].grad = None
        for index, number in self._record.new_grads:
            parameters[index].grad = bindings.outer(outputs[number])
        results = [self._result(place, batch, outputs) for place in self._record.results]
        return pytree.tree_unflatten(results, self._record.nesting)

    def _result(
        self, place: tuple[str, Any], batch: Sequence[Tensor], outputs: list[Tensor]
    ) -> Any:
        kind, value = place
        if kind == "output":
            return bindings.outer(outputs[value])
        if kind == "state":
            return self._tensors[value].detach()
        if kind == "batch":
            return batch[value]
        if kind == "grad":
            return self._parameters[value].grad
        return value


R = TypeVar("R")

_PATIENCE: Final = 3
"""Number of failures since the last new `Program` at which the step is refused. A failure is a step
that differs from the step before or cannot be recorded, such as one that creates state."""


class XlaStep(TracedStep[R]):
    """The traced step on torch_xla; see `traced_step`."""

    def __init__(
        self, function: Callable[..., R], state: State, *, device: torch.device, donate: bool
    ) -> None:
        super().__init__(function, state)
        self._device = str(device)
        self._ownership = Ownership() if donate else None
        self.retrace()

    def retrace(self) -> None:
        """Discard the graphs."""
        self._restart()
        self._failures = 0
        self._discard_graphs()
        if (reason := unusable()) is not None:
            self._refuse(reason)

    def __call__(self, *batch: Any) -> R:
        """Run one step."""
        self._state.refresh()
        if self._refused:
            return self._run_lazily(batch)
        try:
            tensors, layout = flatten_batch(batch)
        except UnsupportedBatchError as error:
            self._refuse(str(error))
            return self._run_lazily(batch)
        if self._is_replaced():
            self._discard_graphs()
            if self._refused:
                return self._run_lazily(batch)
        structure = (layout, self._state.structure(), self._state.hooks())
        values = self._state.values()
        program = self._programs.get(structure)
        if program is not None and program.values == values:
            self.mode = "traced"
            self.reason = None
            self._has_run = True
            result: R = program(tensors)
            return result
        if (
            structure not in self._programs
            and structure not in self._records
            and len(self._programs.keys() | self._records.keys()) >= STRUCTURES
        ):
            self._fall_back(
                f"batches (or modes of the model) have more than {STRUCTURES} structures; each "
                "shape, dtype and Python value in a batch makes one: pad batches, or pass tensors"
            )
            return self._run_lazily(batch)
        return self._record(batch, tensors, structure, values)

    def _record(
        self, batch: Sequence[Any], tensors: Sequence[Tensor], structure: Hashable, values: Hashable
    ) -> R:
        self.mode = "recording"
        self.reason = None
        self._programs.pop(structure, None)
        if any(tensor.device.type != "xla" for tensor in tensors):
            self._fail(
                "a tensor of the batch is on the host; move it to the device before the step"
            )
            return self._run_lazily(batch)
        if self._referents is None or not self._programs:
            self._referents = Referents(self._state, torch.device("xla"), has_addresses=False)
        recorder = Recorder(
            self._device,
            self._state,
            tensors,
            referents=self._referents,
            ownership=self._ownership,
        )
        result: R = recorder.run(self._function, batch)
        try:
            record = recorder.record()
        except CannotFreezeError as error:
            recorder.end()
            self._fail(str(error))
            return result
        recorder.execute(record)
        recorder.end()
        previous = self._records.get(structure)
        self._records[structure] = record
        if previous is None:
            return result
        if (reason := difference(previous, record)) is not None:
            self._fail(reason)
            return result
        self._failures = 0
        del self._records[structure]
        self._programs[structure] = Program(
            record,
            device=self._device,
            state=self._state,
            tensors=recorder.tensors,
            values=values,
            ownership=self._ownership,
        )
        return result

    def _discard_graphs(self) -> None:
        self._programs: dict[Hashable, Program] = {}
        self._records: dict[Hashable, Record] = {}

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if self._failures == _PATIENCE:
            self._refuse(reason)
            self._discard_graphs()

    def _run_lazily(self, batch: Sequence[Any]) -> R:
        result: R = detached(self._function(*batch))
        torch_xla.sync()
        return result
