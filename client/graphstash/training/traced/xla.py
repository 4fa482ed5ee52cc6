"""XlaStep: the traced step on torch_xla; decides when to record, to run a graph, and to refuse.

The first step makes the optimizer's state; it runs as usual. The next two are recorded, and if they
are the same graph over the same arguments, that graph is what every later step is. That makes two
graphs to compile in all, as without tracing.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch_xla
from torch import Tensor

from graphstash.training.device_state import State
from graphstash.training.traced.bindings import Ownership, unusable
from graphstash.training.traced.compare import difference
from graphstash.training.traced.program import Program
from graphstash.training.traced.record import CannotFreezeError, Record
from graphstash.training.traced.recorder import Recorder
from graphstash.training.traced.step import (
    STRUCTURES,
    TracedStep,
    UnsupportedBatchError,
    detached,
    flatten_batch,
)

__all__ = ["XlaStep"]

R = TypeVar("R")

_PATIENCE: Final = 3
"""So many steps in a row may fail to be recorded, or differ from the one before."""


class XlaStep(TracedStep[R]):
    """See `traced_step`."""

    def __init__(
        self, function: Callable[..., R], state: State, *, device: torch.device, donate: bool
    ) -> None:
        super().__init__(function, state)
        self._device = str(device)
        self._ownership = Ownership() if donate else None
        self.retrace()

    def retrace(self) -> None:
        """Forgets the graphs."""
        self.mode = "recording"
        self.reason = None
        self._refused = False
        self._failures = 0
        self._programs: dict[Hashable, Program] = {}
        self._records: dict[Hashable, Record] = {}
        self._state.scan()
        if (why := unusable()) is not None:
            self._refuse(why)

    def __call__(self, *batch: Any) -> R:
        """Runs one step."""
        self._state.refresh()
        if self._refused:
            return self._run_lazily(batch)
        try:
            tensors, layout = flatten_batch(batch)
        except UnsupportedBatchError as why:
            self._refuse(str(why))
            return self._run_lazily(batch)
        structure = (layout, self._state.structure())
        values = self._state.values()
        program = self._programs.get(structure)
        if program is not None and program.values == values:
            self.mode = "traced"
            self.reason = None
            result: R = program(tensors)
            return result
        if (
            structure not in self._programs
            and structure not in self._records
            and len(self._programs.keys() | self._records.keys()) >= STRUCTURES
        ):
            self._be_lazy(
                f"batches (or modes of the model) have come in more than {STRUCTURES} structures; "
                "each shape, dtype and Python value in a batch makes one: pad, or pass tensors"
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
        recorder = Recorder(self._device, self._state, tensors, ownership=self._ownership)
        result: R = recorder.run(self._function, batch)
        try:
            record = recorder.record()
        except CannotFreezeError as why:
            recorder.end()
            self._fail(str(why))
            return result
        recorder.execute(record)
        recorder.end()
        previous = self._records.get(structure)
        self._records[structure] = record
        if previous is None:
            return result
        if (how := difference(previous, record)) is not None:
            self._fail(how)
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

    def _fail(self, reason: str) -> None:
        self._failures += 1
        if self._failures == _PATIENCE:
            self._refuse(reason)
            self._programs.clear()
            self._records.clear()

    def _run_lazily(self, batch: Sequence[Any]) -> R:
        result: R = detached(self._function(*batch))
        torch_xla.sync()
        return result
