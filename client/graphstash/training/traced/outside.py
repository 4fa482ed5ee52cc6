"""Tensors that a step reaches outside of its state, and what a call of the step did to them.

A capture runs the Python of a step once more, and a comparison makes one step three times. Tensors
outside of `state` would change each time. `Outside` finds those that a call has written, by their
versions, or replaced, by their places.

It does not find replaced attributes of classes, nor writes that change no version: through `.data`
or NumPy, and those of inference tensors.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.places import Place, search
from graphstash.training.traced.state import State
from graphstash.training.traced.step import TracedStep

__all__ = ["NO_CHANGES", "Changes", "Outside"]


class Changes(NamedTuple):
    """What a call did to tensors outside of the state.

    Attributes:
        written: by name, the tensors that it wrote in place.
        replaced: the places where it put another tensor, and that tensor.
    """

    written: dict[str, Tensor]
    replaced: list[tuple[Place, Tensor]]

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """Return the names of written tensors and of places with another tensor."""
        return {*self.written}, {place.name for place, _ in self.replaced}


NO_CHANGES: Final = Changes({}, [])


class Outside:
    """The tensors that a function reaches outside of its state, when this was made."""

    def __init__(self, function: Callable[..., object], state: State) -> None:
        inside = [*state.tensors(), *state.parameters]
        inside += [each.grad for each in state.parameters if each.grad is not None]
        self._inside = {
            id(tensor): tensor for tensor in inside
        }  # also keeps the tensors alive, and so their ids
        self._found: list[tuple[Place, Tensor, int]] = []
        for place, tensor in search(function, Tensor, skips=_is_known):
            if id(tensor) not in self._inside and not tensor.is_inference():
                self._found.append((place, tensor, tensor._version))

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return [tensor for _, tensor, _ in self._found]

    def changes(self) -> Changes:
        """Return what has changed since."""
        written = {place.name: each for place, each, was in self._found if each._version != was}
        now = [(place, place.get(), tensor) for place, tensor, _ in self._found]
        replaced = [
            (place, found)
            for place, found, tensor in now
            if isinstance(found, Tensor) and found is not tensor and id(found) not in self._inside
        ]
        return Changes(written, replaced)

    def restore_places(self) -> None:
        """Put all tensors back where they were. Their values stay."""
        for place, tensor, _ in self._found:
            if isinstance(place.get(), Tensor):
                place.set(tensor)


def _is_known(each: object) -> bool:
    """Return whether an object is searched elsewhere: an optimizer, a state, or another step."""
    return issubclass(type(each), (Optimizer, TracedStep)) or all(
        hasattr(type(each), name) for name in ("device_tensors", "refresh")
    )
