"""TracedStep and State: common parts of all traced steps.

A traced step runs a graph instead of the Python that created it. The inputs of this Python must be
tensors, which are arguments of the graph, or host values, which are compared before each step.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from graphstash.training.traced.referents import Referents

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
    """An object that keeps numbers on the device, such as a learning rate that the host changes."""

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the device tensors that may change from step to step."""
        ...

    def refresh(self) -> None:
        """Upload what the host has changed. Called before every step. Keep the tensor objects."""
        ...


T = TypeVar("T")

StateElement = nn.Module | Optimizer | DeviceState | Tensor


class State:
    """The state of a step.

    A module stands for its parameters, their gradients and its buffers. An optimizer stands for its
    state tensors and the gradients of its parameters. A tensor stands for itself and its gradient.

    Raises:
        TypeError: an element has another type.
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
        """Update the lists of modules and parameters."""
        modules = [m for e in self._elements if isinstance(e, nn.Module) for m in e.modules()]
        parameters: list[Tensor] = [
            p for m in modules for p in m._parameters.values() if p is not None
        ]
        parameters += [e for e in self._elements if isinstance(e, Tensor) and e.requires_grad]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters += group["params"]
        self._modules = list(_distinct(modules))
        self.parameters: list[Tensor] = list(_distinct(parameters))

    def has_begun(self) -> bool:
        """Return whether every optimizer has state, from a step or from loading."""
        return all(optimizer.state for optimizer in self.optimizers)

    def refresh(self) -> None:
        """Upload what the host has changed."""
        for element in self._refreshed:
            element.refresh()

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the state except the gradients, each once."""
        return list(_distinct(tensor for e in self._elements for tensor in _tensors_of(e)))

    def names(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return a name for each of the state's tensors or parameters."""
        names: dict[int, str] = {}
        for element in self._elements:
            if isinstance(element, nn.Module):
                named = (*element.named_parameters(), *element.named_buffers())
                names |= {id(tensor): name for name, tensor in named}
        for element in self._elements:
            for tensor in _tensors_of(element):
                names.setdefault(id(tensor), f"a tensor of {type(element).__name__}")
        return [names.get(id(tensor), "a parameter") for tensor in tensors]

    def structure(self) -> Hashable:
        """Return the host's state that selects the graph."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([p.requires_grad for p in self.parameters]),
            tuple([p.grad is None for p in self.parameters]),
        )

    def hooks(self) -> Hashable:
        """Return the registered hooks: global hooks, and hooks of modules, parameters and
        optimizers. A graph calls no hook, but repeats what the hooks did at its capture.
        """
        return (
            *map(tuple, _HOOKS_ON_ALL),
            *((place, *hooks) for place, hooks in self._hooks_of_modules()),
            *(
                (index, kind, *hooks)
                for index, parameter in enumerate(self.parameters)
                for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
                if (hooks := getattr(parameter, kind))
            ),
            *(
                (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
                for optimizer in self.optimizers
            ),
        )

    def unguarded(self) -> Hashable:
        """Return the state that `torch.compile` reads and does not compare at the next call.

        It contains the global hooks, the modules that have hooks, and the tied parameters. torch
        2.7 and 2.15 use the graph of a model with tied weights for a model without them.
        """
        ids = [id(p) for m in self._modules for p in m._parameters.values() if p is not None]
        first: dict[int, int] = {}
        is_tied = len(set(ids)) < len(ids)
        tied = [first.setdefault(each, number) for number, each in enumerate(ids) if is_tied]
        hooked = [place for place, _ in self._hooks_of_modules()]
        return (*map(tuple, _HOOKS_ON_ALL), tuple(hooked), tuple(tied))

    def _hooks_of_modules(self) -> list[tuple[tuple[int, int], dict[int, Any]]]:
        """Return each table with at least one hook, with the numbers of its module and kind."""
        hooked = [
            (number, module)
            for number, module in enumerate(self._modules)
            if module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ]
        return [
            ((number, kind), hooks)
            for number, module in hooked
            for kind, name in enumerate(_HOOKS)
            if (hooks := getattr(module, name))
        ]

    def objects(self) -> list[object]:
        """Return the objects that a graph of the step may read or write, except gradients: the
        parts of the modules, and the tensors and parameters of all other elements.
        """
        found: list[object] = []
        for module in self._modules:
            found += module._modules.values()
            found += module._parameters.values()
            found += module._buffers.values()
        for element in self._elements:
            if not isinstance(element, nn.Module):
                found += _tensors_of(element)
            if isinstance(element, Optimizer):
                for group in element.param_groups:
                    found += group["params"]
        return found

    def values(self) -> Hashable:
        """Return the options of optimizers that a graph may contain as constants, because they are
        not uploaded. A tensor stands for itself; `objects` has it.
        """
        return tuple([_options(g) for each in self._scheduled for g in each.param_groups])

    def options(self) -> Hashable:
        """Return the options of all optimizers, including those that upload them."""
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


def _distinct(items: Iterable[T]) -> Iterator[T]:
    seen: set[int] = set()
    for item in items:
        if id(item) not in seen:
            seen.add(id(item))
            yield item


Mode = Literal["recording", "traced", "lazy"]
R = TypeVar("R")

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_ON_ALL: Final = tuple(getattr(module_hooks, f"_global{name}") for name in _HOOKS)

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
