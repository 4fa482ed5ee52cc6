"""State: what a traced step changes, and what changes between steps."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer

__all__ = ["DeviceState", "State", "StateElement"]

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_ON_ALL: Final = tuple(getattr(module_hooks, f"_global{name}") for name in _HOOKS)


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
        self._tables: list[dict[str, Any]] = [
            table for m in self._modules for table in (m._parameters, m._buffers, m._modules)
        ]
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
        parts of the modules, the parameters and the state of optimizers, their options that are
        tensors and are not uploaded, and other tensors.
        """
        found: list[object] = []
        for table in self._tables:
            found += table.values()
        for element in self._elements:
            if isinstance(element, Optimizer):
                for values in element.state.values():
                    found += values.values()
                for group in element.param_groups:
                    found += group["params"]
            elif not isinstance(element, nn.Module):
                found += _tensors_of(element)
        for optimizer in self._scheduled:
            for group in optimizer.param_groups:
                found += [value for value in group.values() if isinstance(value, Tensor)]
        return found

    def values(self) -> Hashable:
        """Return the options of optimizers that a graph may contain as constants, because they are
        not uploaded. A tensor stands for itself; `objects` has it.
        """
        return tuple([_options(g) for each in self._scheduled for g in each.param_groups])

    def options(self) -> Hashable:
        """Return the options of all optimizers. Some optimizers upload their options."""
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
