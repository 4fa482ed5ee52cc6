"""Compare a captured CUDA graph with the function whose step it is.

A graph keeps the Python numbers of its capture. If one changes with every step, such as a counter,
the next step of the graph differs from that of the function. So the step after a capture is made
three times from the same state: by the function, and twice by the graph. The second time shows how
far the graph differs from itself, because some CUDA kernels add in random order. A change that is
smaller than this noise stays unnoticed. Tensors outside of the state that the capture has changed
are restored and compared like the state, as far as `outside` finds them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.traced.outside import NO_CHANGES, Changes, Outside
from graphstash.training.traced.state import State

__all__ = ["Comparison", "compared"]

R = TypeVar("R")

_NOISE: Final = 16.0
"""By which factor the function may differ more from the graph than the graph from itself. Noise has
a factor of about 1."""

_NAMES: Final = 3
_COPIES: Final = 4
"""Copies of the state that a comparison holds at most, with some space for its own numbers."""

_CHUNK: Final = 1 << 22
"""Elements whose distance is computed at once."""

_log = logging.getLogger("graphstash")


class Comparison(NamedTuple, Generic[R]):
    """What came of a comparison.

    Attributes:
        is_made: whether the step was made.
        result: the function's result. None unless the step was made.
        reason: why the graph must not be used, or None.
    """

    is_made: bool
    result: R | None
    reason: str | None


@torch.no_grad()
def compared(
    function: Callable[[], R],
    graph: Callable[[], Any],
    state: State,
    device: torch.device,
    *,
    outside: Callable[[], Outside] | None = None,
    changes: Changes = NO_CHANGES,
) -> Comparison[R]:
    """Make one step with the function, and compare the graph's with it.

    The step that counts is the function's. It runs once, and the state keeps its values. Copies of
    the state are made in the host's memory; if it does not suffice, nothing is compared. The device
    needs memory for a step beside that of the graph. Without it, no step is made.

    Args:
        function: makes the step.
        graph: makes the step as a graph.
        state: state of the step.
        device: device of the step.
        outside: returns the tensors outside of the state that the function reaches now.
        changes: how the capture of the step changed those tensors. `compared` restores and compares
            the changed tensors as it does the state.
    """
    written = changes.written
    try:
        if not _has_room_for_copies(state):
            _log.warning("the host's memory is too small to compare a CUDA graph with its function")
            return Comparison(is_made=False, result=None, reason=None)
        before = _Values(state, device, outside=written)
        before.write()  # now, because some tensors cannot be written
        reached = None if outside is None else outside()
    except Exception as error:  # noqa: BLE001 - the step runs without a graph
        return Comparison(is_made=False, result=None, reason=_why_incomparable(error))
    try:
        with torch.enable_grad():
            result = function()
    except torch.OutOfMemoryError as error:
        before.write()
        return Comparison(is_made=False, result=None, reason=_why_incomparable(error))
    reason = None
    grads: Sequence[Tensor | None] | None = None
    expected: _Values | None = None
    try:
        expected = _Values(state, device, result, outside=written)
        now = NO_CHANGES if reached is None else reached.changes()
        if replaced := before.replaced_in(expected):
            reason = f"the function replaces {replaced}, which a CUDA graph cannot repeat"
        elif now.names != changes.names:
            (written_now, replaced_now), (was_written, was_replaced) = now.names, changes.names
            names = (written_now ^ was_written) | (replaced_now ^ was_replaced)
            reason = (
                f"the function changes {_listed(sorted(names))} outside of `state` in some steps, "
                "which a CUDA graph does in all or none; put it into `state`"
            )
        else:
            # The graph writes into the tensors of its capture.
            of_graph = [(place.name, tensor) for place, tensor in changes.replaced]
            by_name = {place.name: tensor for place, tensor in now.replaced}
            expected.add(of_graph, [by_name[name] for name, _ in of_graph])
            before.write()
            results = graph()
            first = _Values(state, device, results, outside=written)
            first.add(of_graph, [tensor for _, tensor in of_graph])
            grads = first.grads
            before.write()
            again = graph()
            reason = _difference(expected, first, again, state)
            if reason is None:
                for place, tensor in changes.replaced:
                    place.set(tensor)
    except Exception as error:  # noqa: BLE001 - the step is made: it only runs without a graph
        reason = _why_incomparable(error)
    if expected is not None:
        expected.write(grads=grads)
    return Comparison(is_made=True, result=result, reason=reason)


def _why_incomparable(error: Exception) -> str:
    return f"its CUDA graph cannot be compared: {type(error).__name__}: {error}"


class _Values:
    """The values of the state, the parameters, their gradients and a result, on the host."""

    def __init__(
        self,
        state: State,
        device: torch.device,
        result: object = None,
        *,
        outside: Mapping[str, Tensor],
    ) -> None:
        self._device = device
        self._state = state
        own = _tensors_of(state)
        self.tensors = [*own, *outside.values()]
        self.names = [*state.names(own), *outside]
        self.values = [_copy_to_host(tensor) for tensor in self.tensors]
        self.grads = [parameter.grad for parameter in state.parameters]
        self.grad_values = [None if grad is None else _copy_to_host(grad) for grad in self.grads]
        self.results, self.constants = _results_of(result)
        self._random = torch.cuda.get_rng_state(device)

    def add(self, named: Iterable[tuple[str, Tensor]], values: Iterable[Tensor]) -> None:
        """Add tensors with a name, and other values than they have now."""
        for (name, tensor), value in zip(named, values, strict=True):
            self.tensors.append(tensor)
            self.names.append(name)
            self.values.append(_copy_to_host(value))

    def write(self, *, grads: Sequence[Tensor | None] | None = None) -> None:
        """Restore the values. Gradients go to `grads` where it has tensors."""
        for tensor, kept in zip(self.tensors, self.values, strict=True):
            tensor.copy_(kept)
        targets = self.grads if grads is None else grads
        for parameter, own, target, value in zip(
            self._state.parameters, self.grads, targets, self.grad_values, strict=True
        ):
            grad = own if own is None or target is None else target
            if grad is not None and value is not None:
                grad.copy_(value)
            parameter.grad = grad
        torch.cuda.set_rng_state(self._random, self._device)

    def replaced_in(self, later: "_Values") -> str:
        """Return the names of tensors that are other objects later, or an empty string."""
        is_kept = {id(tensor) for tensor in self.tensors}
        pairs = zip(later.names, later.tensors, strict=True)
        return _listed([name for name, tensor in pairs if id(tensor) not in is_kept])


def _tensors_of(state: State) -> list[Tensor]:
    """Return the state's tensors, and parameters that only an optimizer has, each once."""
    return list({id(each): each for each in [*state.tensors(), *state.parameters]}.values())


def _results_of(result: object) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return the tensors of a result on the host, and all else that it consists of."""
    leaves, nesting = pytree.tree_flatten(result)
    tensors = [_copy_to_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, (nesting, *(leaf for leaf in leaves if not isinstance(leaf, Tensor)))


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _listed(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(f"`{name}`" for name in names[:_NAMES]))


def _has_room_for_copies(state: State) -> bool:
    """Return whether the host has memory for the copies of the state."""
    held = [*_tensors_of(state), *(each.grad for each in state.parameters if each.grad is not None)]
    needed = _COPIES * sum(each.numel() * each.element_size() for each in held)
    return needed <= _available_bytes()


def _available_bytes() -> float:
    """Return how many bytes this process can still allocate, as far as Linux tells."""
    available = float("inf")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # of a container
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def _difference(expected: _Values, first: _Values, again: object, state: State) -> str | None:
    """Return how the graph's step differs from the function's, or None.

    `again` is the result of the graph's second step, whose state is still on the device.
    """
    results, constants = _results_of(again)
    grads = [parameter.grad for parameter in state.parameters]
    if not expected.constants == first.constants == constants:
        return "the function returns other Python values than its CUDA graph"
    rows: list[tuple[str, Tensor, Tensor, Tensor]] = []
    rows += zip(expected.names, expected.values, first.values, expected.tensors, strict=True)
    for name, a, b, c in zip(
        state.names(state.parameters), expected.grad_values, first.grad_values, grads, strict=True
    ):
        if a is not None and b is not None and c is not None:
            rows.append((f"{name}.grad", a, b, c))
        elif a is not None or b is not None:
            return f"the function and its CUDA graph do not both leave a gradient of `{name}`"
    rows += zip(["a result"] * len(results), expected.results, first.results, results, strict=True)
    unequal = [(name, a, b, c) for name, a, b, c in rows if not _is_same(a, b)]
    deviation = noise = 0.0
    for _, a, b, c in unequal:  # relative to its size, as tensors have different units
        scale = max(_square(b), torch.finfo(torch.float64).tiny)
        deviation += _distance(a, b) / scale
        noise += _distance(b, _copy_to_host(c)) / scale
    if not unequal or deviation <= _NOISE**2 * noise < float("inf"):
        return None
    return (
        "its CUDA graph computes other values than the function for "
        f"{_listed([name for name, *_ in unequal])}: a graph keeps the Python numbers of its "
        "capture; put a number that changes with every step into a tensor of `state` or the batch"
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (torch.equal(one, other) or _distance(one, other) == 0)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    chunks: Sequence[Tensor] = tensor.reshape(-1).split(_CHUNK)
    return chunks


def _square(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return sum(float(part.to(wide).abs().square().sum()) for part in _chunks(tensor))


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the squared distance; infinite if only one of two numbers is finite."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    total = 0.0
    for a, b in zip(_chunks(one), _chunks(other), strict=True):
        is_same = (a == b) | (a.isnan() & b.isnan())
        square = (a.to(wide) - b.to(wide)).abs().square()
        total += float(torch.where(is_same, 0.0, square).sum())
    return total if total == total else float("inf")  # noqa: PLR0124 - NaN
