"""Cohorts: which parameters are updated together, and the state that belongs to them.

Parameters that have always been updated together share one step tensor; a parameter that had no
gradient for a while gets a step of its own, as in `torch.optim`.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Cohort", "Place", "States", "begin", "cohorts_of"]

Place = tuple[torch.device, torch.dtype]

States = MutableMapping[Tensor, dict[str, Any]]
"""By parameter: its state tensors by name; an optimizer's `state`."""


@dataclass(slots=True)
class Cohort:
    """Parameters of one group, device and dtype that share a step, with what belongs to them."""

    step: Tensor  # [], float32
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    slots: list[list[Tensor]] = field(default_factory=list)
    """For each kind of state, the parameters' tensors."""

    def suits_fused_kernels(self) -> bool:
        """Whether torch's own fused kernels may update it.

        They compute at once, with numbers (betas, momentum) from the host; in what is only recorded
        for later these would be frozen. On a CPU they go over memory from a tensor's first element
        on, as if all of a parameter's tensors were laid out alike and without gaps, and do not look
        (torch 2.7); on CUDA they refuse others.
        """
        device = self.parameters[0].device.type
        if device not in ("cpu", "cuda") or torch.compiler.is_compiling():
            return False
        if device == "cuda" and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return False
        for tensors in zip(self.parameters, self.gradients, *self.slots, strict=True):
            if not all(tensor.is_contiguous() for tensor in tensors):
                strides = torch.empty_like(tensors[0], device="meta").stride()  # without gaps
                if any(tensor.stride() != strides for tensor in tensors):
                    return False
        return True


def cohorts_of(
    parameters: Iterable[Tensor], states: States, names: Sequence[str], newborn: list[Tensor]
) -> Iterable[Cohort]:
    """The parameters that have a gradient, by step.

    Args:
        parameters: of one group.
        states: of these and maybe others.
        names: of the state tensors that every parameter has beside `step`.
        newborn: gets the state tensors that are made here.
    """
    needed = {"step", *names}
    cohorts: dict[int, Cohort] = {}
    waiting: set[int] = set()  # steps that a parameter without a gradient shares
    steps: dict[Place, Tensor] = {}
    for parameter in parameters:
        gradient = parameter.grad
        state = states.get(parameter)
        if gradient is None:
            if state:
                waiting.add(id(state["step"]))
            continue
        if state is None or not needed <= state.keys():
            state = begin(parameter, states, names, steps, newborn)
        step = state["step"]
        cohort = cohorts.get(id(step))
        if cohort is None:
            cohort = cohorts[id(step)] = Cohort(step, slots=[[] for _ in names])
        cohort.parameters.append(parameter)
        cohort.gradients.append(gradient)
        for slot, name in zip(cohort.slots, names, strict=True):
            slot.append(state[name])
    for shared in waiting & cohorts.keys():
        cohort = cohorts[shared]
        cohort.step = cohort.step.clone()
        for parameter in cohort.parameters:
            states[parameter]["step"] = cohort.step
    return cohorts.values()


def begin(
    parameter: Tensor,
    states: States,
    names: Sequence[str],
    steps: dict[Place, Tensor],
    newborn: list[Tensor],
) -> dict[str, Any]:
    """Makes what is missing of a parameter's state: zeros.

    Options may ask for another state tensor later on; it joins the others. If there are none, as
    when SGD gets a momentum, the parameter begins anew.

    Args:
        parameter: real; its gradient is dense.
        states: gets the state.
        names: as for `cohorts_of`.
        steps: of the parameters that begin together.
        newborn: gets the tensors that are made here.

    Raises:
        RuntimeError: the parameter is complex or its gradient sparse.
    """
    gradient = parameter.grad
    if not parameter.is_floating_point() or (gradient is not None and gradient.is_sparse):
        raise RuntimeError(
            "the sync-free optimizers are for real parameters with dense gradients, not for one "
            f"of {parameter.dtype} with a gradient of layout "
            f"{None if gradient is None else gradient.layout}; use torch.optim for it"
        )
    state = states.setdefault(parameter, {})
    if "step" not in state or not any(name in state for name in names):
        place = (parameter.device, parameter.dtype)
        if place not in steps:
            steps[place] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            newborn.append(steps[place])
        state["step"] = steps[place]
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            newborn.append(state[name])
    return state
