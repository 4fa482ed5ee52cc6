"""PartialStep: step an optimizer for some of its parameters, with options of an earlier time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.cohort import set_counts_apart
from graphstash.training.optimizers.prepared import PreparedUpdate, prepared

__all__ = ["Options", "PartialStep", "in_units", "options_of", "small_of", "undecorated"]

_UNIT_BYTES: Final = 1024**2
"""Maximum bytes of parameters that are updated together. Each update costs the host about thirty
microseconds."""

Options = Sequence[Mapping[str, Any]]
"""The options of each parameter group, without its parameters."""


def options_of(optimizer: Optimizer) -> Options:
    """Return the current options. Tensors and lists are copied: they may change in place."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if type(value) in {list, tuple} else value


def small_of(parameters: Iterable[Tensor]) -> set[Tensor]:
    """Return the smallest parameters, one unit in sum. Fusing them would cost more than it saves.

    Biases and norms are most of a model's tensors, but almost none of its memory.
    """
    small = set()
    size = 0
    for parameter in sorted(parameters, key=_bytes):
        size += _bytes(parameter)
        if size > _UNIT_BYTES:
            break
        small.add(parameter)
    return small


def in_units(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group neighboring parameters into units; a parameter larger than a unit stays alone."""
    units: list[list[Tensor]] = []
    size = _UNIT_BYTES
    for parameter in parameters:
        size += _bytes(parameter)
        if not units or size > _UNIT_BYTES:
            units.append([])
            size = _bytes(parameter)
        units[-1].append(parameter)
    return units


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


class PartialStep:
    """Updates units: sets of parameters that are always updated together.

    In a sync-free optimizer, parameters that are updated together share the tensor of their step
    count, so each unit gets its own tensor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = undecorated(type(optimizer).step)
        self._group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._devices = {parameter.device.type for parameter in self._group_of}
        self._are_counts_apart = False
        self._units: list[Sequence[Tensor]] = []
        self._by_group: dict[int, dict[int, list[Tensor]]] = {}
        """By id of a unit: the unit's parameters by the number of their group."""
        self._prepared: dict[int, PreparedUpdate | None] = {}

    def set_units(self, units: Iterable[Sequence[Tensor]]) -> None:
        """Set which parameters are updated together."""
        self._units = list(units)
        self._by_group = {id(unit): self._split(unit) for unit in self._units}
        self.state_has_changed()

    def state_has_changed(self) -> None:
        """Discard prepared updates: other code has updated parameters or loaded their state."""
        self._are_counts_apart = False
        self._prepared.clear()

    def __call__(
        self,
        unit: Sequence[Tensor],
        options: Options,
        *,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Update the parameters of a unit that have a gradient."""
        if found_inf is None and (update := self._prepared.get(id(unit))) is not None:
            with torch.no_grad():
                if not torch.is_inference_mode_enabled() and update(options):
                    return
        by_group = self._by_group[id(unit)]
        # The caller may be a module that runs under autocast or in inference mode. Neither may
        # affect the step.
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(mode=False))
            for device in self._devices:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            self.set_counts_apart()
            optimizer = self._optimizer
            if isinstance(optimizer, SyncFreeOptimizer) and self._step is _SYNC_FREE_STEP:
                chosen = {
                    number: {**options[number], "params": members}
                    for number, members in by_group.items()
                }
                optimizer.update(chosen, found_inf, grad_scale)
                if found_inf is None and id(unit) not in self._prepared:
                    self._prepared[id(unit)] = prepared(optimizer, chosen)
            else:
                stack.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
                optimizer.param_groups = [
                    {**values, "params": by_group.get(number, [])}
                    for number, values in enumerate(options)
                ]
                if found_inf is not None:
                    stack.enter_context(_scaled(optimizer, found_inf, grad_scale))
                self._step(optimizer)

    def _split(self, unit: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        chosen: dict[int, list[Tensor]] = {}
        for parameter in unit:
            chosen.setdefault(self._group_of[parameter], []).append(parameter)
        return chosen

    def set_counts_apart(self) -> None:
        """Give each unit its own tensors of step counts."""
        if self._are_counts_apart:
            return
        self._are_counts_apart = True
        if not isinstance(self._optimizer, SyncFreeOptimizer):
            return
        alone = self._group_of.keys() - {each for unit in self._units for each in unit}
        set_counts_apart(self._optimizer.state, [alone, *self._units])


@contextmanager
def _scaled(optimizer: Optimizer, found_inf: Tensor, grad_scale: Tensor | None) -> Iterator[None]:
    """Pass a loss scale to an optimizer as torch.amp.GradScaler does, then restore attributes."""
    given = {"found_inf": found_inf, "grad_scale": grad_scale}
    before = {name: value for name, value in vars(optimizer).items() if name in given}
    vars(optimizer).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(optimizer)[name]
        vars(optimizer).update(before)


def undecorated(step: Any) -> Any:
    """Return `step` without torch's wrapper for hooks and profiling, which is for whole steps."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


_SYNC_FREE_STEP: Final = SyncFreeOptimizer.step
