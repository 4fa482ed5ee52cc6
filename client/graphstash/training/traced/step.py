"""TracedStep and State: what all forms of a traced step have in common.

A traced step runs a graph without running the Python that made it. What that Python would have seen
must therefore be either in tensors, which the graph takes as arguments, or compared before a step.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

__all__ = [
    "STRUCTURES",
    "DeviceState",
    "State",
    "StateElement",
    "TracedStep",
    "UnsupportedBatchError",
    "detached",
    "flatten_batch",
]


@runtime_checkable
class DeviceState(Protocol):
    """Something that keeps numbers on the device and lets the host change some of them."""

    def device_tensors(self) -> Iterable[Tensor]:
        """The tensors that live on the device and may change from step to step."""
        ...

    def refresh(self) -> None:
        """Uploads what the host has changed, such as a new learning rate.

        Called before every step. The tensors stay the same objects.
        """
        ...


T = TypeVar("T")

StateElement = nn.Module | Optimizer | DeviceState | Tensor


class State:
    """The state of a step.

    Args:
        elements: a module stands for its parameters, their gradients and its buffers; an optimizer
            for its state tensors and the gradients of its parameters.

    Raises:
        TypeError: an element is none of these.
    """

    def __init__(self, elements: Sequence[StateElement]) -> None:
        for element in elements:
            if not isinstance(element, nn.Module | Optimizer | DeviceState | Tensor):
                raise TypeError(
                    f"{type(element).__name__} in state; give modules, optimizers, tensors, or "
                    "objects with device_tensors() and refresh()"
                )
        self._elements = tuple(elements)
        self._refreshed = [e for e in elements if isinstance(e, DeviceState)]
        self.optimizers = [e for e in elements if isinstance(e, Optimizer)]
        self._scheduled = [e for e in self.optimizers if not isinstance(e, DeviceState)]
        self.scan()

    def scan(self) -> None:
        """Looks for modules and parameters again."""
        modules = [m for e in self._elements if isinstance(e, nn.Module) for m in e.modules()]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters += group["params"]
        self._modules = list(_distinct(modules))
        self.parameters: list[Tensor] = list(_distinct(parameters))

    def has_begun(self) -> bool:
        """Whether every optimizer has state: it has made a step, or was loaded."""
        return all(optimizer.state for optimizer in self.optimizers)

    def refresh(self) -> None:
        """Uploads what the host has changed."""
        for element in self._refreshed:
            element.refresh()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state but the gradients, each once."""
        return list(_distinct(tensor for e in self._elements for tensor in _tensors_of(e)))

    def structure(self) -> Hashable:
        """What of the host's state decides which graph a step is."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([p.requires_grad for p in self.parameters]),
            tuple([p.grad is None for p in self.parameters]),
        )

    def values(self) -> Hashable:
        """What of the host's state a graph may have taken in as a constant.

        The options of ordinary optimizers, and which objects hold their state: both change when a
        schedule or `load_state_dict` does.
        """
        return (
            tuple([id(optimizer.state) for optimizer in self.optimizers]),
            tuple([_options(g) for optimizer in self._scheduled for g in optimizer.param_groups]),
        )

    def options(self) -> Hashable:
        """The options of all optimizers, those that upload them as well."""
        return tuple([_options(g) for optimizer in self.optimizers for g in optimizer.param_groups])


def _options(group: dict[str, object]) -> Hashable:
    return tuple(
        [
            id(v) if isinstance(v, Tensor) else tuple(v) if isinstance(v, list) else v
            for k, v in group.items()
            if k != "params"
        ]
    )


def _tensors_of(element: StateElement) -> Iterator[Tensor]:
    if isinstance(element, Tensor):
        yield element
    elif isinstance(element, nn.Module):
        yield from element.parameters()
        yield from element.buffers()
    elif isinstance(element, DeviceState):
        yield from element.device_tensors()
    else:
        for state in element.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in element.param_groups:
            yield from (value for value in group.values() if isinstance(value, Tensor))


def _distinct(things: Iterable[T]) -> Iterator[T]:
    seen: set[int] = set()
    for thing in things:
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing


Mode = Literal["recording", "traced", "lazy"]
R = TypeVar("R")

STRUCTURES: Final = 8
"""So many structures of a batch (and of the model's flags) get a graph of their own."""

_CONSTANTS: Final = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_log = logging.getLogger("graphstash")


class TracedStep(ABC, Generic[R]):
    """A training step that is called as its function is; made by `traced_step`.

    Attributes:
        mode: "recording": the function runs and is recorded; "traced": a graph runs in its place;
            "lazy": the function runs, as without tracing. Of the last call.
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

    def _restart(self) -> None:
        self.mode = "recording"
        self.reason = None
        self._refused = False
        self._state.scan()
        for optimizer in self._state.optimizers:
            if getattr(optimizer, "works_on_host", False):
                self._refuse(f"{type(optimizer).__name__} computes a part of its steps on the host")

    def _refuse(self, reason: str) -> None:
        """From now on every call runs the function."""
        self._refused = True
        self._be_lazy(reason)

    def _be_lazy(self, reason: str) -> None:
        self.mode = "lazy"
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("running the training step untraced: %s", reason)


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
