"""Referents: the objects that graphs refer to, and whether a state still has the same ones.

A graph reads and writes the tensors of its recording, and contains the values of tensors on the
host. Between two steps, code may put another tensor in a place of the state: by `load_state_dict`,
`optimizer.state.clear()`, `parameter.data = ...` or `module.buffer = ...`. Then the graph would
train on tensors that nobody reads.
"""

from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstash.training.traced.state import State

__all__ = ["Referents"]

_form: Final = attrgetter("dtype", "shape")


class Referents:
    """The objects of a state at a recording. They stay alive, so no other object gets an id of one.

    Args:
        state: the state of the step.
        device: the device of the step. Tensors elsewhere are constants of a graph.
        has_addresses: whether the graph reads memory addresses, as a CUDA graph does.
    """

    def __init__(self, state: State, device: torch.device, *, has_addresses: bool) -> None:
        self._objects = state.objects()
        tensors = [each for each in self._objects if isinstance(each, Tensor)]
        parameters = {id(each): each for each in tensors if isinstance(each, nn.Parameter)}
        self._parameters = list(parameters.values())  # `Module.to` keeps them, and sets their data
        self._forms = list(map(_form, self._parameters))
        self._placed = [each for each in tensors if has_addresses and _has_address(each)]
        self._addresses = [each.data_ptr() for each in self._placed]
        self._on_host = [each for each in tensors if _is_on_host(each, device)]
        self._contents = [_content(each) for each in self._on_host]
        self._kept = [each.detach().clone() for each in self._on_host]

    def are_of(self, state: State) -> bool:
        """Return whether the state has these objects, at these addresses, with these contents on
        the host, and with these dtypes and shapes of parameters.
        """
        objects = state.objects()
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and list(map(_form, self._parameters)) == self._forms
            and [each.data_ptr() for each in self._placed] == self._addresses
            and [_content(each) for each in self._on_host] == self._contents
        )

    def changed_in(self, state: State) -> str:
        """Return the names of the state's tensors for which `are_of` is false, or an empty string
        if they are unknown.
        """
        held = set(map(id, self._objects))
        changed = [x for x in state.objects() if isinstance(x, Tensor) and id(x) not in held]
        forms = zip(self._parameters, self._forms, strict=True)
        changed += [parameter for parameter, form in forms if _form(parameter) != form]
        pairs = zip(self._placed, self._addresses, strict=True)
        changed += [tensor for tensor, address in pairs if tensor.data_ptr() != address]
        hosted = zip(self._on_host, self._contents, strict=True)
        changed += [tensor for tensor, content in hosted if _content(tensor) != content]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(state.names(changed)))

    @torch.no_grad()
    def restore_host(self) -> None:
        """Give the tensors on the host the values that they had."""
        for tensor, value in zip(self._on_host, self._kept, strict=True):
            tensor.copy_(value)


def _is_on_host(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type != device.type


def _has_address(tensor: Tensor) -> bool:
    """Return whether a tensor has memory, which some subclasses have not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _content(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
