"""Recorder: runs one step lazily, and compiles what the step leaves uncomputed into one graph.

The recorder first computes everything pending on the device, so only the step's work is uncomputed
afterwards. It runs the graph through torch_xla's cache of compiled graphs. The second recording of
a step, and every later step, finds the graph there.

roots      the graph's outputs, tensors that the step computed: changed state, gradients, results
arguments  the device data that the roots depend on. Each is a tensor of the state, a gradient, a
           tensor of the batch, the random seed, or frozen: a number that Python uploaded, or a
           tensor from outside of state and batch
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch_xla
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from graphstash.training.traced import bindings
from graphstash.training.traced.bindings import XLA, Ownership, Seeds
from graphstash.training.traced.referents import Referents
from graphstash.training.traced.state import State
from graphstash.training.traced.step import detached

__all__ = ["CannotFreezeError", "Place", "Record", "Recorder", "difference"]

Place = tuple[str, Any]
"""Origin of an argument or a result: ("state", index), ("grad", index), ("batch", index),
("seed", 0), ("output", index), ("frozen", None), or ("constant", value)."""


class CannotFreezeError(Exception):
    """The step has an effect that its graph would not repeat. The message names the effect."""


@dataclass
class Record:
    """One step as a graph."""

    graph: bytes  # torch_xla's hash of the graph
    arguments: tuple[Place, ...]
    targets: tuple[Place, ...]  # overwritten by the first outputs: state, then gradients
    new_grads: tuple[tuple[int, int], ...]  # (parameter, output) of each new gradient
    cleared: tuple[int, ...]  # parameters whose gradient becomes None
    results: tuple[Place, ...]
    nesting: Any  # pytree structure of the results
    values: list[Tensor]  # the arguments
    roots: list[Tensor]

    def release(self) -> None:
        """Release the step's data, except frozen values, which `difference` compares."""
        self.roots = []
        for position, (kind, _) in enumerate(self.arguments):
            if kind != "frozen":
                self.values[position] = None  # type: ignore[call-overload] # never read again


def show(tensor: Tensor) -> str:
    """Return the value of a host tensor with one element as text; otherwise dtype and shape."""
    if tensor.numel() == 1 and tensor.device.type == "cpu":
        return f"{tensor.item():.9g}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Recorder:
    """Records one step. `referents` are the objects of the state before the step."""

    def __init__(
        self,
        device: str,
        state: State,
        batch: Sequence[Tensor],
        *,
        referents: Referents,
        ownership: Ownership | None,
    ) -> None:
        self._device = device
        self._referents = referents
        self._ownership = ownership
        self._state = state
        self._seeds = Seeds(device)
        XLA._xla_sync_live_tensors(device, [], wait=False)
        self.tensors = [t for t in state.tensors() if t.device.type == "xla"]
        if ownership is not None:
            ownership.ensure(self.tensors, device)
        self._options = state.options()
        self._grads = [p.grad for p in state.parameters]
        self._places: dict[str, Place] = {}
        self._alive: list[Tensor] = []  # so that no other data gets an address in `_places`
        self._shares_data = False
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
        """Run the step lazily, and return its uncomputed result."""
        self._executions = executions()
        self._reads = Reads()
        with self._reads:
            result = detached(function(*batch))
        # If an alias no longer has the id of its tensor, the function assigned the tensor's data.
        # Reading the ids also makes functionalization drop intermediates of in-place changes.
        self._moved = [
            i
            for i, (tensor, alias) in enumerate(zip(self.tensors, self._aliases, strict=True))
            if XLA._xla_get_tensor_id(tensor) != XLA._xla_get_tensor_id(alias)
        ]
        del self._aliases
        self._results, self._nesting = pytree.tree_flatten(result)
        return result

    def record(self) -> Record:
        """Compile what the step has left uncomputed.

        Raises:
            CannotFreezeError: the step cannot become a graph. It can still be computed lazily.
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
        """Run the graph, and store its outputs in the step's tensors."""
        with bindings.without_functionalization():
            outputs = XLA._run_cached_graph(record.graph, record.values)
        for index in self._moved:  # so that older aliases get the new values
            self.tensors[index].data = bindings.outer(self._before[index])
        bindings.write(record.roots, outputs)
        record.release()
        self._alive.clear()  # donated data must not be read
        self._before.clear()

    def end(self) -> None:
        """Compute what is still uncomputed, and advance the random seed."""
        torch_xla.sync()
        self._seeds.advance()
        if self._ownership is not None:
            self._ownership.settle()

    def _place(self, tensor: Tensor, place: Place) -> str:
        address, data = bindings.handle(tensor)
        self._shares_data |= address in self._places
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
        if not self._referents.are_of(self._state):
            raise CannotFreezeError(
                f"the function replaces {self._referents.changed_in(self._state) or 'its state'}, "
                "or changes it on the host; torch.optim keeps step counts there: use the "
                "optimizers of graphstash.training, or capturable=True"
            )
        if self._shares_data:
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
                parameter.grad = bindings.outer(bindings.inner(after))  # drops intermediates
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


def difference(old: Record, new: Record) -> str | None:
    """Return how two recordings of a step differ, or None if they are equal.

    Downloads a frozen value from the device unless both recordings share its data.
    """
    if old.graph != new.graph:
        return (
            "its graph differs from one step to the next; Python code of the function decides what "
            "is computed"
        )
    if (old.arguments, old.targets, old.new_grads, old.cleared) != (
        *(new.arguments, new.targets, new.new_grads, new.cleared),
    ):
        return "its graph is computed from, or into, other tensors from one step to the next"
    for (kind, _), before, after in zip(old.arguments, old.values, new.values, strict=True):
        if kind == "frozen" and (values := _different(before, after)):
            return (
                f"Python gives the device {values[0]} in one step and {values[1]} in the next (a "
                "learning rate, a step count, a random number?); make it a tensor on the device in "
                "`state` or in the batch, or use the optimizers of graphstash.training"
            )
    if old.nesting != new.nesting or len(old.results) != len(new.results):
        return "the structure of the function's result differs from one step to the next"
    for result, other in zip(old.results, new.results, strict=True):
        if _result_differs(result, other):
            return f"the function returns {result[1]} in one step and {other[1]} in the next"
    return None


def _different(before: Tensor, after: Tensor) -> tuple[str, str] | None:
    same_data = XLA._unique_id_for_ir_and_data(before) == XLA._unique_id_for_ir_and_data(after)
    if same_data:
        return None
    first, second = XLA._xla_get_cpu_tensors([before, after])
    if first.numel() == 1 == second.numel():
        # Compare bits: NaN equals NaN, and 0 differs from -0.
        same = first.numpy().tobytes() == second.numpy().tobytes()
        return None if same else (f"{first.item():.9g}", f"{second.item():.9g}")
    if first.shape == second.shape and torch.equal(first, second):
        return None
    return (f"a tensor {list(first.shape)}", f"another one {list(second.shape)}")


def _result_differs(before: tuple[str, Any], after: tuple[str, Any]) -> bool:
    if before[0] == after[0] == "constant" and isinstance(before[1], Tensor):
        return not isinstance(after[1], Tensor) or _different(before[1], after[1]) is not None
    return before != after


_READS: Final = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__"),
        *("__index__", "__repr__", "__format__", "__array__", "equal"),
    )
) | {torch.equal, torch.allclose}


class Reads(TorchFunctionMode):
    """Records where this thread first reads from the device; changes no result."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.first is None and _reads(func, args, result):
            self.first = f"{getattr(func, '__name__', func)} in {_caller()}"
        return result


def _reads(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    if not args or not isinstance(args[0], Tensor) or args[0].device.type == "cpu":
        return False
    moved = isinstance(result, Tensor) and result.device.type == "cpu"
    return moved or func in _READS


def _caller() -> str:
    """Return file and line of the innermost caller outside of torch and this package."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inside):
            return f"{frame.filename}:{frame.lineno}"
    return "torch"


def executions() -> int:
    """Return the number of torch_xla's graph look-ups, one before each execution."""
    counts = (XLA._xla_counter_value(name) for name in ("CachedCompile", "UncachedCompile"))
    return sum(count or 0 for count in counts)


def leftovers(device: str, roots: Sequence[Tensor]) -> str | None:
    """Describe uncomputed tensors that are not among `roots`; None if there are none."""
    if _count(device) == len(roots):
        return None
    gc.collect()
    number = _count(device) - len(roots)
    if number == 0:
        return None
    known = {XLA._xla_get_tensor_id(root) for root in roots}
    found = {
        show(x)
        for x in gc.get_objects()
        if type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "xla"
        and XLA._check_tensor_need_materialization([x])[0]
        and XLA._xla_get_tensor_id(x) not in known
    }
    return f"{number}: {', '.join(sorted(found)[:3]) or 'none that Python can see'}"


def _count(device: str) -> int:
    return sum(XLA._check_device_tensor_need_materialization(device))
