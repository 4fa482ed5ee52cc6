"""State of a training step: which tensors it has, and what the host can change about it.

A traced step runs a graph without running the Python that made it. What that Python would have seen
must therefore be either in tensors, which the graph takes as arguments, or compared before a step.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["DeviceState", "State", "StateElement"]


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
                    f"{type(element).__name__} in state: give modules, optimizers, tensors, or "
                    "objects with device_tensors() and refresh()"
                )
        self._elements = tuple(elements)
        self._refreshed = [e for e in elements if isinstance(e, DeviceState)]
        self.optimizers = [e for e in elements if isinstance(e, Optimizer)]
        self._scheduled = [e for e in self.optimizers if not isinstance(e, DeviceState)]
        self.scan()

    def scan(self) -> None:
        """Looks for modules and parameters anew."""
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
