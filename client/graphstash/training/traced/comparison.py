"""Compare a captured CUDA graph with the function whose step it is.

A graph keeps the Python numbers of its capture. If one changes with every step, such as a counter,
the next step of the graph differs from that of the function. So the step after a capture is made
three times from the same state: by the function, and twice by the graph. The second time shows how
far the graph differs from itself, because some CUDA kernels add in random order.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.traced.step import State

__all__ = ["compared"]

R = TypeVar("R")

_NOISE: Final = 16.0
"""By which factor the function may differ more from the graph than the graph from itself. Noise has
a factor of about 1."""

_NAMES: Final = 3


@torch.no_grad()
def compared(
    function: Callable[[], R], graph: Callable[[], Any], state: State, device: torch.device
) -> tuple[R, str | None]:
    """Make one step with the function, and compare the graph's with it.

    The step that counts is the function's. It runs once, and the state keeps its values. Copies of
    the state are made in the host's memory, so the device needs no more than for a step.

    Args:
        function: makes the step.
        graph: makes the step as a graph.
        state: state of the step.
        device: device of the step.

    Returns:
        The function's result, and why the graph differs, or None if it does not.
    """
    before = _Values(state, device)
    with torch.enable_grad():
        result = function()
    expected = _Values(state, device, result)
    try:
        before.write()
        first = _Values(state, device, graph())
        before.write()
        second = _Values(state, device, graph())
        return result, _difference(before, expected, first, second, state)
    except Exception as error:  # noqa: BLE001 - the step is made: it only runs without a graph
        return result, f"its CUDA graph cannot be compared: {type(error).__name__}: {error}"
    finally:
        expected.write(into=before)


class _Values:
    """The values of the state, the gradients and a result, in the host's memory."""

    def __init__(self, state: State, device: torch.device, result: object = None) -> None:
        self._device = device
        self._tensors = state.tensors()
        self.state = [_on_host(tensor) for tensor in self._tensors]
        self.parameters = state.parameters
        self.grads = [parameter.grad for parameter in self.parameters]
        self.grad_values = [None if grad is None else _on_host(grad) for grad in self.grads]
        leaves = pytree.tree_leaves(result)
        self.results = [_on_host(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self._random = torch.cuda.get_rng_state(device)

    def write(self, *, into: "_Values | None" = None) -> None:
        """Restore the values. With `into`, gradients go to the tensors that it found, if any."""
        for tensor, kept in zip(self._tensors, self.state, strict=True):
            tensor.copy_(kept)
        targets = self.grads if into is None else into.grads
        for parameter, own, target, value in zip(
            self.parameters, self.grads, targets, self.grad_values, strict=True
        ):
            grad = own if own is None or target is None else target
            if grad is not None and value is not None:
                grad.copy_(value)
            parameter.grad = grad
        torch.cuda.set_rng_state(self._random, self._device)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _difference(
    before: _Values, expected: _Values, first: _Values, second: _Values, state: State
) -> str | None:
    """Return which tensors the graph computes otherwise than the function, or None."""
    names = [f"`{name}`" for name in state.names()]
    triples = list(zip(names, expected.state, first.state, second.state, strict=True))
    grads = (expected.grad_values, first.grad_values, second.grad_values)
    for kept, a, b, c in zip(before.grads, *grads, strict=True):
        if kept is not None and a is not None and b is not None and c is not None:
            triples.append(("a gradient", a, b, c))  # a graph writes only into kept ones
    results = zip(expected.results, first.results, second.results, strict=True)
    triples += [("a result", *each) for each in results]
    unequal = [(name, a, b, c) for name, a, b, c in triples if not _is_same(a, b)]
    deviation = sum(_distance(a, b) for _, a, b, _ in unequal)
    noise = sum(_distance(b, c) for _, _, b, c in unequal)
    if not unequal or deviation <= _NOISE**2 * noise < float("inf"):
        return None
    found = ", ".join(dict.fromkeys(name for name, *_ in unequal[:_NAMES]))
    return (
        f"its CUDA graph computes other values than the function for {found}: a graph keeps the "
        "Python numbers of its capture; put a number that changes with every step into a tensor "
        "of `state` or the batch"
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    is_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.tensor(False)
    return one.shape == other.shape and bool(((one == other) | is_nan).all())


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the squared distance; infinite if only one of two numbers is finite."""
    same = (one == other) | (one.isnan() & other.isnan())
    difference = (one.to(torch.complex128) - other.to(torch.complex128)).abs()
    square = float(torch.where(same, 0.0, difference).square().sum())
    return square if square == square else float("inf")  # noqa: PLR0124 - NaN
