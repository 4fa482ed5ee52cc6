"""StandIns: gradients without memory, where the first step has freed those that it was made of.

The optimizer alone leaves gradients in place, and the next backward adds to them unless zero_grad()
removes them before. That cannot be fused and is refused; what tells it are these, which zero_grad()
removes as it does gradients.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["StandIns"]


class StandIns:
    """Zeros that take the memory of one number, as the gradients of parameters.

    Args:
        parameters: of which the gradients were freed.
        refuse: called with a parameter whose stand-in is used as a gradient.
    """

    def __init__(self, parameters: Iterable[Tensor], refuse: Callable[[Tensor], None]) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self._refuse = refuse
        self._handles: list[Any] = []
        this = weakref.ref(self)
        for parameter in parameters:
            parameter.grad = parameter.detach().new_zeros(()).expand_as(parameter)
            self._of[parameter] = parameter.grad
            if parameter.requires_grad:
                hook = _before_accumulation(this, weakref.ref(parameter))
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call] # torch

    def check(self, parameter: Tensor) -> None:
        """Refuses if the parameter's stand-in is still there."""
        stand_in = self._of.get(parameter)
        if stand_in is not None and parameter.grad is stand_in:
            self._refuse(parameter)

    def remove(self) -> None:
        """Takes those away that are still there."""
        for handle in self._handles:
            handle.remove()
        for parameter, stand_in in self._of.items():
            if parameter.grad is stand_in:
                parameter.grad = None
        self._of.clear()

    def check_all(self) -> None:
        """As `check`, for all of them."""
        for parameter in self._of:
            self.check(parameter)


def _before_accumulation(
    stand_ins: "weakref.ref[StandIns]", parameter: "weakref.ref[Tensor]"
) -> Callable[[Tensor], None]:
    """A hook that autograd calls before it adds to a parameter's gradient; keeps neither alive."""

    def hook(_: Tensor) -> None:
        its, own = stand_ins(), parameter()
        if its is not None and own is not None:
            its.check(own)

    return hook
