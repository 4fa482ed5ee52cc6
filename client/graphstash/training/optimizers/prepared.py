"""PreparedUpdate: repeats an update by torch's kernels with less work on the host.

Between two layers of a large model, the interpreter is no longer in the CPU's cache. Work that
takes 25 microseconds in a loop takes ten times as long there. A PreparedUpdate therefore keeps what
stays the same from step to step: the tensors, the kernel, and whether it is exact. It checks for
changes before it updates anything. After a change, `SyncFreeOptimizer.update` has to make the
update.
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
"""By the number of a group: its options."""


@dataclass(slots=True)
class _Part:
    """A cohort of one group, and the kernel for the group's last options."""

    group: int
    cohort: Cohort
    names: tuple[str, ...]
    options: Mapping[str, Any] | None = None
    kernel: Callable[..., object] | None = None


class PreparedUpdate:
    """An update that can be repeated; `prepared` creates it."""

    def __init__(self, optimizer: SyncFreeOptimizer, parts: list[_Part]) -> None:
        self._optimizer = optimizer
        self._parts = parts

    def __call__(self, options: Options) -> bool:
        """Update with each group's options, under `no_grad`. Return False, and change nothing, if
        `SyncFreeOptimizer.update` has to make the update.
        """
        try:
            if not self._takes_gradients(options):
                return False
            for part in self._parts:
                self._optimizer._update_fused(part.kernel, part.cohort)  # type: ignore[arg-type] # checked above
            return True
        finally:
            self._leave_gradients()

    def is_possible(self, options: Options) -> bool:
        """Return whether the update could be made now; changes nothing."""
        try:
            return self._takes_gradients(options)
        finally:
            self._leave_gradients()

    def _takes_gradients(self, options: Options) -> bool:
        return all(self._is_ready(part, options[part.group]) for part in self._parts)

    def _leave_gradients(self) -> None:
        for part in self._parts:
            part.cohort.gradients.clear()  # or this object would keep them in memory

    def _is_ready(self, part: _Part, group: Mapping[str, Any]) -> bool:
        """Return whether state and gradients are unchanged, and store the gradients."""
        cohort = part.cohort
        rows = zip(cohort.parameters, *cohort.slots, strict=True)
        for parameter, *slots in rows:
            gradient, state = parameter.grad, self._optimizer.state.get(parameter)
            if gradient is None or gradient.layout is not torch.strided or not state:
                return False
            now = [state.get(name) for name in part.names]
            if state.get("step") is not cohort.step or any(map(is_not, now, slots)):
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
    """Return an object that repeats the update just made, or None if it needs more than torch's
    kernels. `groups` are those passed to `SyncFreeOptimizer.update`.
    """
    if type(optimizer)._update_cohort is not SyncFreeOptimizer._update_cohort:
        return None  # a subclass does more than call kernels
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
    # Tensors and lists may change in place. Comparing tensors would read the device.
    return any(
        isinstance(value, Tensor | list) or isinstance(old.get(name), Tensor) or value != old[name]
        for name, value in new.items()
    )
