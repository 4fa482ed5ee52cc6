"""PreparedUpdate: repeats an optimizer update by torch's kernels with less work in Python.

Between two layers of a large model, the CPU's cache has lost the interpreter. Work that takes 25
microseconds in a loop then takes ten times as long. A PreparedUpdate therefore keeps what stays the
same from step to step: the state tensors, the kernel, and whether the kernel is exact. If one of
them has changed, it updates nothing, and the caller must call `SyncFreeOptimizer.update`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort, cohorts_of
from graphstash.training.sharding import is_sharded

__all__ = ["PreparedUpdate", "prepared"]

Options = Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
"""Options of each parameter group, by its index."""


@dataclass(slots=True)
class _Part:
    """A cohort of one group, and the kernel for the group's `options`."""

    group: int
    cohort: Cohort
    names: tuple[str, ...]
    options: Mapping[str, Any] | None = None
    kernel: Callable[..., object] | None = None


class PreparedUpdate:
    """A repeatable update of some parameters, created by `prepared`."""

    def __init__(self, optimizer: SyncFreeOptimizer, parts: list[_Part]) -> None:
        self._optimizer = optimizer
        self._parts = parts

    def __call__(self, options: Options) -> bool:
        """Update the parameters and return True. Return False, and change nothing, if the caller
        must call `SyncFreeOptimizer.update`. Call this under `no_grad`.
        """
        try:
            if not self._collect_gradients(options):
                return False
            for part in self._parts:
                self._optimizer._update_fused(part.kernel, part.cohort)  # type: ignore[arg-type] # checked above
            return True
        finally:
            self._release_gradients()

    def is_possible(self, options: Options) -> bool:
        """Return whether a call would succeed now."""
        try:
            return self._collect_gradients(options)
        finally:
            self._release_gradients()

    def _collect_gradients(self, options: Options) -> bool:
        return all(self._is_ready(part, options[part.group]) for part in self._parts)

    def _release_gradients(self) -> None:
        for part in self._parts:
            part.cohort.gradients.clear()  # do not keep them in memory until the next step

    def _is_ready(self, part: _Part, group: Mapping[str, Any]) -> bool:
        """Collect the gradients. Return whether the state tensors and the kernel still fit."""
        cohort = part.cohort
        rows = zip(cohort.parameters, *cohort.slots, strict=True)
        for parameter, *slots in rows:
            gradient, state = parameter.grad, self._optimizer.state.get(parameter)
            if gradient is None or gradient.layout is not torch.strided or not state:
                return False
            current = [state.get(name) for name in part.names]
            if state.get("step") is not cohort.step or any(map(is_not, current, slots)):
                return False
            if not cohort.suits_kernels((parameter, gradient, *slots)):
                return False
            cohort.gradients.append(gradient)
        return cohort.allows_fused_kernels() and self._has_kernel(part, group)

    def _has_kernel(self, part: _Part, group: Mapping[str, Any]) -> bool:
        if part.options is not group:
            if part.options is None or _has_changed(part.options, group):
                names = self._optimizer._new_state(group).names
                if any(names(parameter) != part.names for parameter in part.cohort.parameters):
                    return False
                scheduled = self._optimizer._scheduled(group)
                part.kernel = self._optimizer._kernel(group, scheduled, part.cohort)
            part.options = group
        return part.kernel is not None


def prepared(
    optimizer: SyncFreeOptimizer, groups: Mapping[int, Mapping[str, Any]]
) -> PreparedUpdate | None:
    """Return an object that repeats the update that `SyncFreeOptimizer.update` has just made with
    `groups`. Return None if the update needs more than torch's kernels.
    """
    if type(optimizer)._update_cohort is not SyncFreeOptimizer._update_cohort:
        return None  # the subclass does more than call kernels
    parts = []
    for index, group in groups.items():
        if any(parameter.grad is None or is_sharded(parameter) for parameter in group["params"]):
            return None
        new = optimizer._new_state(group)
        for cohort in cohorts_of(group["params"], optimizer.state, new, []):
            cohort.gradients.clear()
            parts.append(_Part(index, cohort, new.names(cohort.parameters[0])))
    update = PreparedUpdate(optimizer, parts)
    return update if update.is_possible(groups) else None


def _has_changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    # Tensors and lists count as changed, because they may change in place. Comparing tensors would
    # wait for the device.
    return any(
        isinstance(value, Tensor | list)
        or isinstance(old.get(name), Tensor)
        or name not in old
        or value != old[name]
        for name, value in new.items()
    )
