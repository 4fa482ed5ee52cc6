"""Program: a frozen step, ready to run.

What a step costs the host is here, so everything that can be known beforehand is.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.device_state import State
from graphstash.training.traced import bindings
from graphstash.training.traced.bindings import XLA, Ownership, Seeds
from graphstash.training.traced.record import Record

__all__ = ["Program"]


class Program:
    """Runs a recorded step again: on new batches, over the state as it is then.

    Args:
        record: what to run.
        tensors: the state's, in the order of the record.
        values: of the host's state that the graph has taken in; the caller compares them.
        ownership: of the state's data; None if nothing is donated.
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
        self._graph = record.graph
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
        self._new_grads = record.new_grads
        self._cleared = record.cleared
        self._results = record.results
        self._nesting = record.nesting

    def __call__(self, batch: Sequence[Tensor]) -> Any:
        """Runs the step.

        Args:
            batch: the batch's tensors.
        """
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
        # Changes through an alias reach a tensor when it is looked at; then all that was recorded
        # since the last step is computed, for it may need what this step overwrites.
        XLA._check_tensor_need_materialization(arguments)
        XLA._xla_sync_live_tensors(self._device, [], wait=False)
        targets = self._state_targets
        if self._ownership is not None:
            self._ownership.ensure(targets, self._device)
        if self._grad_targets:
            targets = targets + [parameters[i].grad for i in self._grad_targets]
        with bindings.without_functionalization():
            outputs = XLA._run_cached_graph(self._graph, arguments)
            bindings.write(targets, outputs[: len(targets)])
        seeds.advance()
        for index in self._cleared:
            parameters[index].grad = None
        for index, number in self._new_grads:
            parameters[index].grad = bindings.outer(outputs[number])
        results = [self._result(place, batch, outputs) for place in self._results]
        return pytree.tree_unflatten(results, self._nesting)

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
