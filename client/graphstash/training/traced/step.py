"""TracedStep: what all forms of a traced step have in common."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.device_state import State

__all__ = [
    "STRUCTURES",
    "Mode",
    "TracedStep",
    "UnsupportedBatchError",
    "detached",
    "flatten_batch",
]

Mode = Literal["recording", "traced", "lazy"]
R = TypeVar("R")

STRUCTURES: Final = 8
"""So many structures of a batch (and of the model's flags) get a graph of their own."""

_CONSTANTS: Final = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_log = logging.getLogger("graphstash")


class TracedStep(ABC, Generic[R]):
    """A training step that is called as its function is; made by `traced_step`.

    Attributes:
        mode: "recording": the function runs, and is watched; "traced": it does not run any more, a
            graph does; "lazy": it runs every time, as without us. Of the last call.
        reason: why the step is, or its last call was, lazy; None otherwise.
    """

    def __init__(self, function: Callable[..., R], state: State) -> None:
        self.mode: Mode = "recording"
        self.reason: str | None = None
        self._function = function
        self._state = state
        self._refused = False
        self._warned: set[str] = set()

    @abstractmethod
    def __call__(self, *batch: Any) -> R:
        """One training step: what `function(*batch)` does and gives, without its autograd graph."""

    @abstractmethod
    def retrace(self) -> None:
        """Forgets the graphs: the next steps run the function again.

        For changes that a graph cannot see: a Python value that the function uses, a tensor outside
        of `state` and the batch, a parameter that was replaced by another object. Also gives a step
        that was refused another chance.
        """

    def _refuse(self, reason: str) -> None:
        """From now on every call runs the function."""
        self._refused = True
        self._be_lazy(reason)

    def _be_lazy(self, reason: str) -> None:
        self.mode = "lazy"
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("the training step runs without being traced: %s", reason)


class UnsupportedBatchError(Exception):
    """A part of the batch is neither a tensor nor a constant; says which."""


def flatten_batch(batch: Sequence[Any]) -> tuple[list[Tensor], Hashable]:
    """Takes a batch apart.

    Returns:
        Its tensors; and all that a graph must know of it: their shapes, dtypes and devices, which
        of them are the same object, the values of everything else, and how it is nested.

    Raises:
        UnsupportedBatchError: something is neither a tensor, nor a tuple, list or dictionary of
            tensors, nor a Python constant.
    """
    tensors: list[Tensor] = []
    layout = tuple([_take_apart(item, tensors) for item in batch])
    if len(set(map(id, tensors))) == len(tensors):
        return tensors, layout
    return tensors, (
        layout,
        tuple(next(i for i, x in enumerate(tensors) if x is y) for y in tensors),
    )


def _take_apart(item: Any, tensors: list[Tensor]) -> Hashable:
    if isinstance(item, Tensor):
        tensors.append(item)
        return (item.shape, item.dtype, item.device, item.requires_grad)
    kind = type(item)
    if isinstance(item, tuple | list):
        return (kind, *[_take_apart(x, tensors) for x in item])
    if isinstance(item, dict):
        return (kind, *[(key, _take_apart(x, tensors)) for key, x in item.items()])
    if item is None or isinstance(item, _CONSTANTS):
        return (kind, item)
    raise UnsupportedBatchError(
        f"a {kind.__name__} is in the batch; a traced step takes tensors, tuples, lists and "
        "dictionaries of them, and Python constants"
    )


def detached(result: R) -> R:
    """The result without its autograd graph, which would keep every activation alive."""
    cut: R = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach() if tensor.requires_grad else tensor, result
    )
    return cut
