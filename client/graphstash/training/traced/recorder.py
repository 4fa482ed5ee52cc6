"""Recorder: lets one step run as usual, and makes a graph of what torch_xla recorded of it.

All that the device holds is computed beforehand, so what the step leaves uncomputed is its work.
The recorded step runs through the cache of torch_xla's dynamo bridge, as all later ones will: its
graph is the one that they use, so recording twice compiles once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
from torch import Tensor
from torch.utils import _pytree as pytree
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from graphstash.training.device_state import State
from graphstash.training.traced import bindings
from graphstash.training.traced.bindings import XLA, Ownership, Seeds
from graphstash.training.traced.leftovers import executions, leftovers
from graphstash.training.traced.reads import Reads
from graphstash.training.traced.record import CannotFreezeError, Place, Record, show
from graphstash.training.traced.step import detached

__all__ = ["Recorder"]


class Recorder:
    """Records the next step; one object for one step."""

    def __init__(
        self,
        device: str,
        state: State,
        batch: Sequence[Tensor],
        *,
        ownership: Ownership | None,
    ) -> None:
        self._device = device
        self._ownership = ownership
        self._state = state
        self._seeds = Seeds(device)
        XLA._xla_sync_live_tensors(device, [], wait=False)
        everything = state.tensors()
        self.tensors = [t for t in everything if t.device.type == "xla"]
        if ownership is not None:
            ownership.ensure(self.tensors, device)
        self._host = [(t, t.clone()) for t in everything if t.device.type != "xla"]
        self._options = state.options()
        self._grads = [p.grad for p in state.parameters]
        self._places: dict[str, Place] = {}
        self._alive: list[Tensor] = []  # device data is known by its address
        self._twice = False
        self._addresses = [self._place(t, ("state", i)) for i, t in enumerate(self.tensors)]
        for i, gradient in enumerate(self._grads):
            if gradient is not None:
                self._place(gradient, ("grad", i))
        for i, tensor in enumerate(batch):
            if all(tensor is not other for other in batch[:i]):
                self._place(tensor, ("batch", i))
        self._place(self._seeds.take(), ("seed", 0))
        self._aliases = [t.detach() for t in self.tensors]
        self._before = [bindings.inner(t).detach() for t in self.tensors]

    def run(self, function: Callable[..., Any], batch: Sequence[Any]) -> Any:
        """Runs the step; its result is not computed yet."""
        self._executions = executions()
        self._reads = Reads()
        with self._reads:
            result = detached(function(*batch))
        # Looking at an alias also lets functionalization forget the intermediates of changes in
        # place. An alias that does not follow shows that the tensor was given other data.
        self._moved = [
            i
            for i, (tensor, alias) in enumerate(zip(self.tensors, self._aliases, strict=True))
            if XLA._xla_get_tensor_id(tensor) != XLA._xla_get_tensor_id(alias)
        ]
        del self._aliases
        self._results, self._nesting = pytree.tree_flatten(result)
        return result

    def record(self) -> Record:
        """Looks at what the step has left behind, and compiles it.

        Raises:
            CannotFreezeError: it cannot become a graph; nothing has happened to it.
        """
        self._check()
        roots, targets = self._changed_state()
        number_of = {XLA._xla_get_tensor_id(root): i for i, root in enumerate(roots)}
        new_grads, cleared = self._changed_grads(roots, targets, number_of)
        results = tuple(self._result_place(leaf, roots, number_of) for leaf in self._results)
        if others := leftovers(self._device, roots):
            raise CannotFreezeError(
                f"the function changes or keeps tensors that are not in `state` ({others}); put "
                "them there"
            )
        values = XLA._get_tensors_xla_device_data_node(roots)[1]
        addresses = [XLA._unique_id_for_ir_and_data(value) for value in values]
        arguments = tuple(self._places.get(address, ("frozen", None)) for address in addresses)
        if self._ownership is not None:
            overwritten = set(targets)
            for place, value in zip(arguments, values, strict=True):
                if place in overwritten:
                    XLA._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            graph = XLA._get_graph_hash(roots)
            XLA._xla_warm_up_cache(roots, [])
        return Record(
            graph=graph,
            arguments=arguments,
            targets=tuple(targets),
            new_grads=tuple(new_grads),
            cleared=tuple(cleared),
            results=results,
            nesting=self._nesting,
            values=values,
            roots=roots,
        )

    def execute(self, record: Record) -> None:
        """Runs the recorded step, and gives everything that it left uncomputed its value."""
        with bindings.without_functionalization():
            outputs = XLA._run_cached_graph(record.graph, record.values)
        for index in self._moved:  # back, so that aliases from before the step follow
            self.tensors[index].data = bindings.outer(self._before[index])
        bindings.write(record.roots, outputs)
        record.release()
        self._alive.clear()  # what was donated is gone; nothing may look at it
        self._before.clear()

    def end(self) -> None:
        """Ends the step; whatever is still uncomputed is computed now."""
        torch_xla.sync()
        self._seeds.advance()
        if self._ownership is not None:
            self._ownership.settle()

    def _place(self, tensor: Tensor, place: Place) -> str:
        address, data = bindings.handle(tensor)
        self._twice |= address in self._places
        self._places[address] = place
        self._alive.append(data)
        return address

    def _check(self) -> None:
        if self._reads.first is not None:
            raise CannotFreezeError(
                f"the function reads the device ({self._reads.first}); return the tensor and read "
                "it after the step"
            )
        if executions() != self._executions:
            raise CannotFreezeError(
                "the function makes the device compute before the step is complete (a mark_step or "
                "sync, or an operation whose result's shape depends on values)"
            )
        if self._state.options() != self._options:
            raise CannotFreezeError(
                "the function changes an option of an optimizer, such as its learning rate; step "
                "the schedule outside of it"
            )
        now = [t for t in self._state.tensors() if t.device.type == "xla"]
        if list(map(id, now)) != list(map(id, self.tensors)):
            raise CannotFreezeError("the function makes or replaces tensors of the state")
        for tensor, before in self._host:
            if not torch.equal(tensor, before):
                raise CannotFreezeError(
                    f"a tensor of the state is on the host and changed from {show(before)} to "
                    f"{show(tensor)}; torch.optim keeps step counts there: use the optimizers of "
                    "graphstash.training, or capturable=True"
                )
        if self._twice:
            raise CannotFreezeError(
                "two tensors of the state or the batch share their device data; clone() one"
            )

    def _changed_state(self) -> tuple[list[Tensor], list[Place]]:
        changed = XLA._check_tensor_need_materialization(self.tensors)
        for tensor, change, address in zip(self.tensors, changed, self._addresses, strict=True):
            if not change and bindings.handle(tensor)[0] != address:
                raise CannotFreezeError(
                    f"the function sets a tensor of the state {show(tensor)} to one that it did "
                    "not compute; keep that outside of the step"
                )
        indices = [i for i, change in enumerate(changed) if change]
        return [self.tensors[i] for i in indices], [("state", i) for i in indices]

    def _changed_grads(
        self, roots: list[Tensor], targets: list[Place], number_of: dict[int, int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        new, cleared, accumulated = [], [], []
        for i, (parameter, before) in enumerate(
            zip(self._state.parameters, self._grads, strict=True)
        ):
            after = parameter.grad
            if after is None:
                if before is not None:
                    cleared.append(i)
            elif not XLA._check_tensor_need_materialization([after])[0]:
                if after is not before:
                    raise CannotFreezeError("the function sets a gradient that it did not compute")
            elif XLA._xla_get_tensor_id(after) in number_of:
                raise CannotFreezeError("a gradient is a tensor of the state too; clone() it")
            elif after is before:
                accumulated.append(i)
            else:
                parameter.grad = bindings.outer(bindings.inner(after))  # without intermediates
                new.append(i)
        for i in (*accumulated, *new):
            gradient = self._state.parameters[i].grad
            if gradient is not None:  # for the type checker
                number_of[XLA._xla_get_tensor_id(gradient)] = len(roots)
                roots.append(gradient)
        targets += [("grad", i) for i in accumulated]
        return [(i, len(targets) + n) for n, i in enumerate(new)], cleared

    def _result_place(self, leaf: Any, roots: list[Tensor], number_of: dict[int, int]) -> Place:
        if not isinstance(leaf, Tensor):
            return ("constant", leaf)
        if leaf.device.type != "xla":
            raise CannotFreezeError("the function returns a tensor on the host")
        number = XLA._xla_get_tensor_id(leaf)
        for i, tensor in enumerate(self.tensors):
            if number == XLA._xla_get_tensor_id(tensor):
                return ("state", i)
        if not XLA._check_tensor_need_materialization([leaf])[0]:
            return self._places.get(bindings.handle(leaf)[0], ("constant", leaf))
        if number not in number_of:
            number_of[number] = len(roots)
            roots.append(leaf)
        return ("output", number_of[number])
