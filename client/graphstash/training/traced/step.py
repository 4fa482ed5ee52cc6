"""TracedStep: common parts of all traced steps.

A traced step runs a graph instead of the Python that created it. The inputs of this Python must be
tensors, which are arguments of the graph, or host values, which are compared before each step.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphstash.training.traced.referents import Referents
from graphstash.training.traced.state import State

__all__ = [
    "STRUCTURES",
    "TracedStep",
    "UnsupportedBatchError",
    "detached",
    "flatten_batch",
]


Mode = Literal["recording", "traced", "lazy"]
R = TypeVar("R")

STRUCTURES: Final = 8
"""Maximum number of graphs. Each structure of a batch and of the model's flags needs one."""

_REPLACEMENTS: Final = 4
"""Number of replacements of state in a row, each before a graph has run again, at which a step is
refused."""

_CONSTANTS: Final = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_log = logging.getLogger("graphstash")


class TracedStep(ABC, Generic[R]):
    """A training step that is called like its function; made by `traced_step`.

    Attributes:
        mode: What the last call did. "recording": it ran the function and tried to record it.
            "traced": it ran a graph instead. "lazy": it ran the function without recording.
        reason: Why the step, or its last call, is lazy; otherwise None.
    """

    def __init__(self, function: Callable[..., R], state: State) -> None:
        self.mode: Mode = "recording"
        self.reason: str | None = None
        self._function = function
        self._state = state
        self._refused = False
        self._warned: set[str] = set()
        self._referents: Referents | None = None  # of all graphs
        self._has_run = False  # a graph, since the last replacement
        self._replacements = 0

    @abstractmethod
    def __call__(self, *batch: Any) -> R:
        """Make one training step. Return the result of `function(*batch)`, detached."""

    @abstractmethod
    def retrace(self) -> None:
        """Discard the graphs, so that the next steps run the function again. Retry a refused step.

        Call it after changes that a traced step does not detect: of a Python value that the
        function uses, or of a tensor outside of `state` and the batch.
        """

    def _restart(self) -> None:
        self.mode = "recording"
        self.reason = None
        self._refused = False
        self._referents = None
        self._has_run = False
        self._replacements = 0
        self._state.scan()
        for optimizer in self._state.optimizers:
            if getattr(optimizer, "works_on_host", False):
                self._refuse(f"{type(optimizer).__name__} computes a part of its steps on the host")

    def _is_replaced(self) -> bool:
        """Return whether the state has other objects than at the recording of the graphs, which are
        then of no use. Refuse the step if this happens again and again.
        """
        if self._referents is None or self._referents.are_of(self._state):
            return False
        self._referents = None
        self._state.scan()
        self._replacements = 1 if self._has_run else self._replacements + 1
        self._has_run = False
        if self._replacements == _REPLACEMENTS:
            self._refuse(
                "tensors of the state, or their values on the host, are replaced again and again "
                "between the steps; change them in place, on the device"
            )
        return True

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        self.mode = "lazy"
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("running the training step untraced: %s", reason)


class UnsupportedBatchError(Exception):
    """A part of the batch is neither a tensor nor a constant."""


def flatten_batch(batch: Sequence[Any]) -> tuple[list[Tensor], Hashable]:
    """Split a batch into its tensors and everything else that a graph depends on: their shapes,
    dtypes and devices, which need gradients, which are the same object, all constants, and nesting.

    Raises:
        UnsupportedBatchError: an element is neither a tensor, nor a Python constant, nor a tuple,
            list or dictionary of these.
    """
    tensors: list[Tensor] = []
    layout = tuple([_flatten(item, tensors) for item in batch])
    if len(set(map(id, tensors))) == len(tensors):
        return tensors, layout
    return tensors, (
        layout,
        tuple(next(i for i, x in enumerate(tensors) if x is y) for y in tensors),
    )


def _flatten(item: Any, tensors: list[Tensor]) -> Hashable:
    if isinstance(item, Tensor):
        tensors.append(item)
        return (item.shape, item.dtype, item.device, item.requires_grad)
    kind = type(item)
    if isinstance(item, tuple | list):
        return (kind, *[_flatten(x, tensors) for x in item])
    if isinstance(item, dict):
        return (kind, *[(key, _flatten(x, tensors)) for key, x in item.items()])
    if item is None or isinstance(item, _CONSTANTS):
        return (kind, item)
    raise UnsupportedBatchError(
        f"a {kind.__name__} is in the batch; a traced step takes tensors, tuples, lists and "
        "dictionaries of them, and Python constants"
    )


def detached(result: R) -> R:
    """Return the result without its autograd graph, which would keep every activation alive."""
    cut: R = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach() if tensor.requires_grad else tensor, result
    )
    return cut
