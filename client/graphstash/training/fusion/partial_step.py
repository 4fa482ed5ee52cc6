"""PartialStep: an optimizer's step for some of its parameters, with options of another moment."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.device import formula_only
from graphstash.training.optimizers.base import SyncFreeOptimizer

__all__ = ["Options", "PartialStep", "in_units", "options_of"]

_UNIT_BYTES: Final = 1024**2
"""Smaller parameters are updated together up to this size: each update costs the host some fifty
microseconds, whatever its size."""

Options = Sequence[Mapping[str, Any]]
"""Of each group, what it has beside its parameters."""


def options_of(optimizer: Optimizer) -> Options:
    """What the groups have now. Tensors are copied: a schedule may change them in place."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def in_units(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups neighbors; one that is larger than a unit stays alone."""
    units: list[list[Tensor]] = []
    size = _UNIT_BYTES
    for parameter in parameters:
        size += parameter.numel() * parameter.element_size()
        if not units or size > _UNIT_BYTES:
            units.append([])
            size = parameter.numel() * parameter.element_size()
        units[-1].append(parameter)
    return units


class PartialStep:
    """Updates units: sets of parameters that are always updated together.

    The sync-free optimizers keep one step count for parameters that are updated together. Those of
    different units get one each.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = _bare_step(optimizer)
        self._group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._are_counts_apart = False
        self._formula_only = False
        self._units: list[Sequence[Tensor]] = []

    def set_units(self, units: Iterable[Sequence[Tensor]]) -> None:
        """Says which parameters are updated together."""
        self._units = list(units)
        self.state_has_changed()

    def state_has_changed(self) -> None:
        """Somebody else has updated parameters or loaded their state."""
        self._are_counts_apart = False

    def watch_layouts(self) -> None:
        """Looks at gradients before a step for all, which computes all parameters of a group by the
        formula when torch's kernel does not suit one of them; so does each partial step then.
        """
        self._formula_only = isinstance(self._optimizer, SyncFreeOptimizer) and any(
            parameter.grad is not None
            and not (parameter.is_contiguous() and parameter.grad.is_contiguous())
            for parameter in self._group_of
        )

    def __call__(
        self,
        parameters: Sequence[Tensor],
        options: Options,
        *,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Makes the step for those of `parameters` that have a gradient."""
        optimizer = self._optimizer
        chosen: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for parameter in parameters:
            chosen[self._group_of[parameter]].append(parameter)
        begins = any(not optimizer.state.get(parameter) for parameter in parameters)
        groups = optimizer.param_groups
        chosen_groups = [
            {**values, "params": members}
            for values, members in zip(options, chosen, strict=False)  # a new group has no unit
        ]
        # A module that is called in a context of its caller's: the step is made outside of it.
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            for device in {parameter.device.type for parameter in parameters}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if self._formula_only:
                token = formula_only.set(True)
                stack.callback(formula_only.reset, token)
            self._set_counts_apart()
            optimizer.param_groups = chosen_groups
            try:
                if found_inf is None:
                    self._step(optimizer)
                else:
                    self._step(optimizer, found_inf=found_inf, grad_scale=grad_scale)
            finally:
                optimizer.param_groups = groups
                # Those that begin together share a count.
                self._are_counts_apart = not begins

    def _set_counts_apart(self) -> None:
        if self._are_counts_apart:
            return
        self._are_counts_apart = True
        if not isinstance(self._optimizer, SyncFreeOptimizer):
            return
        for unit in self._units:
            own: dict[int, Tensor] = {}
            for parameter in unit:
                state = self._optimizer.state.get(parameter)
                if state:
                    count = state["step"]
                    if id(count) not in own:
                        own[id(count)] = count.clone()
                    state["step"] = own[id(count)]


def _bare_step(optimizer: Optimizer) -> Any:
    """The class's own `step`, without hooks and profiling, which belong to the whole step."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step
