"""Cohorts: parameters that are updated together, and whether torch's fused kernels may update them.

Parameters that have always been updated together share one step tensor. If some of them have no
gradient in a step, get another dtype, or move to another group, they part from the others: one part
continues with a copy of the tensor. Each parameter's count is the same as in `torch.optim`. To
change the count of one parameter, put a new tensor into its state.

A fused kernel is tested on this machine before its first use: it updates scratch tensors, and the
result must match the formula's. On CPU, `torch._fused_sgd_` does not store bfloat16 and float16
parameters of 16 elements or more (torch 2.4 to 2.13, pytorch/pytorch#191763). Without the test,
such a model would never change, and torch would raise no error.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from graphstash.training.device import formula_only
from graphstash.training.sharding import Sums, aligned, is_sharded, local

__all__ = [
    "MASTER",
    "Cohort",
    "NewState",
    "Place",
    "begin",
    "cohorts_of",
    "computes_the_same",
    "place_of",
    "set_counts_apart",
]

Place = tuple[torch.device, torch.dtype, tuple[str, ...]]
"""A parameter's device, dtype and state names. Parameters that share a step have the same place."""

MASTER: Final = "master"
"""Name of the float32 state tensor; the half-precision parameter is its rounded copy."""

_PART_BYTES: Final = 2**22
"""Large enough for a batch of a few matrices of 256 x 1024, small enough for a CPU's cache."""

States = MutableMapping[Tensor, dict[str, Any]]
"""State tensors by parameter and name; an optimizer's `state`."""


class NewState(NamedTuple):
    """How to create the state of a group's parameters."""

    names: Callable[[Tensor], tuple[str, ...]]
    """Returns the names of a parameter's state tensors, without `step`."""
    beginning: Callable[[Tensor, str], Tensor]
    """Returns the initial value of a state tensor."""


@dataclass(slots=True)
class Cohort:
    """Parameters of one group, device and dtype that share a step; their gradients and state."""

    step: Tensor  # [], float32
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    slots: list[list[Tensor]] = field(default_factory=list)
    """One list for each state name, with one tensor per parameter."""
    found_inf: Tensor | None = None  # [], float32: nonzero if the step must change nothing
    grad_scale: Tensor | None = None  # [], float32
    sums: Sums = field(default_factory=Sums)
    """Sums over the processes that hold the parameters' shards."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.parameters[0].device

    @property
    def wide(self) -> torch.dtype:
        """The dtype of uploaded scalars, such as the learning rate."""
        return torch.float64 if self.parameters[0].dtype == torch.float64 else torch.float32

    def part(self, states: States) -> None:
        """Give these parameters a copy of their step tensor."""
        self.step = self.step.clone()
        for parameter in self.parameters:
            states[parameter]["step"] = self.step

    def take_shards(self) -> None:
        """Replace DTensors by this process's shards."""
        if any(map(is_sharded, self.parameters)):
            self.sums = Sums(self.parameters)
            pairs = zip(self.gradients, self.parameters, strict=True)
            self.gradients = [local(aligned(*pair)) for pair in pairs]
            self.parameters = list(map(local, self.parameters))
            self.slots = [list(map(local, slot)) for slot in self.slots]

    def by_layout(self) -> tuple["Cohort | None", "Cohort | None"]:
        """Split into parameters that torch's fused kernels may update, and the others.

        All tensors of a parameter (itself, gradient, state) must have the same:

            dtype    a model may be converted in part, and a gradient may be wider (`grad_dtype`)
            shape    a kernel would write past the end of a smaller state tensor
            sign     as in memory; the kernels refuse negated views, such as `x.conj().imag`
            layout   without gaps: CUDA kernels raise an error, CPU kernels (torch 2.7) do not check

        The result for a parameter, and thus its bits, does not depend on the other parameters.
        """
        if not self.allows_fused_kernels():
            return None, self
        rows = list(zip(self.parameters, self.gradients, *self.slots, strict=True))
        numbers: dict[bool, list[int]] = {True: [], False: []}
        for number, tensors in enumerate(rows):
            numbers[self.suits_kernels(tensors)].append(number)
        if not numbers[False]:
            return self, None
        if not numbers[True]:
            return None, self
        # Both parts increment their step, and the copy is dropped.
        return self._select(numbers[True]), self._select(numbers[False], step=self.step.clone())

    def in_parts(self) -> Iterator["Cohort"]:
        """Yield parts whose new values fit into the cache of a CPU. The last part has `step`.

        A CPU has to fetch memory that it has not used for long, and to clear new memory. Updating
        part after part uses the same memory for the new values of each. Other devices are given
        all parameters in as few calls as possible.
        """
        sizes = [parameter.nbytes for parameter in self.parameters]
        is_plain = self.device.type == "cpu" and not torch.compiler.is_compiling()
        if not is_plain or self.sums or sum(sizes) <= _PART_BYTES:
            yield self
            return
        numbers: list[int] = []
        room = _PART_BYTES
        for number in sorted(range(len(sizes)), key=lambda n: tuple(self.parameters[n].shape)):
            if numbers and sizes[number] > room:
                yield self._select(numbers, step=self.step.clone())
                numbers, room = [], _PART_BYTES
            numbers.append(number)
            room -= sizes[number]
        yield self._select(numbers)

    def _select(self, numbers: Sequence[int], **changes: Any) -> "Cohort":
        def chosen(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[number] for number in numbers]

        return replace(
            self,
            parameters=chosen(self.parameters),
            gradients=chosen(self.gradients),
            slots=list(map(chosen, self.slots)),
            sums=self.sums.of(numbers),
            **changes,
        )

    def suits_kernels(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors of a parameter have its dtype, shape and layout."""
        dtype, shape = self.parameters[0].dtype, tensors[0].shape
        for tensor in tensors:  # faster than any()
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.is_neg():
                return False
        return _are_laid_out_alike(tensors)

    def allows_fused_kernels(self) -> bool:
        """Return whether a kernel may run now. Tracing and capture would freeze the host's scalars,
        such as betas.
        """
        if not self.has_addresses() or formula_only.get():
            return False
        return not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def has_addresses(self) -> bool:
        """Return whether the tensors have memory now: they are neither on torch_xla nor traced."""
        return self.device.type in {"cpu", "cuda"} and not torch.compiler.is_compiling()


def _are_laid_out_alike(tensors: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = torch.empty_like(tensors[0], device="meta").stride()  # without gaps
    return all(tensor.stride() == strides for tensor in tensors)


def cohorts_of(
    parameters: Iterable[Tensor], states: States, new: NewState, created: list[Tensor]
) -> Iterable[Cohort]:
    """Group the parameters that have a gradient by step tensor and dtype. Append new tensors to
    `created`.
    """
    cohorts: dict[tuple[int, torch.dtype], Cohort] = {}
    taken: set[int] = set()  # IDs of step tensors that a cohort must not increment
    steps: dict[Place, Tensor] = {}
    for parameter in parameters:
        gradient = parameter.grad
        state = states.get(parameter)
        if gradient is None:
            if state:
                taken.add(id(state["step"]))
            continue
        if gradient.layout is not torch.strided:
            raise _unsuitable(parameter)
        names = new.names(parameter)
        if state is None or not {"step", *names} <= state.keys():
            state = begin(parameter, states, new, steps, created)
        step = state["step"]
        place = (id(step), parameter.dtype)
        cohort = cohorts.get(place)
        if cohort is None:
            cohort = cohorts[place] = Cohort(step, slots=[[] for _ in names])
        cohort.parameters.append(parameter)
        cohort.gradients.append(gradient)
        for slot, name in zip(cohort.slots, names, strict=True):
            slot.append(state[name])
    for (step_id, _), cohort in cohorts.items():
        if step_id in taken:
            cohort.part(states)
        taken.add(step_id)
        cohort.take_shards()
    return cohorts.values()


def begin(
    parameter: Tensor,
    states: States,
    new: NewState,
    steps: dict[Place, Tensor],
    created: list[Tensor],
) -> dict[str, Any]:
    """Create the missing state tensors of a parameter, and append them to `created`.

    A parameter without any, for example after SGD got a momentum, starts from step 0. If only some
    are missing, because an option changed, the step count stays. Equal places share a tensor in
    `steps`.

    Raises:
        RuntimeError: the parameter is complex.
    """
    if not parameter.is_floating_point():
        raise _unsuitable(parameter)
    state = states.setdefault(parameter, {})
    names = new.names(parameter)
    if "step" not in state or not any(name in state for name in names):
        place = place_of(parameter, names)
        if place not in steps:
            steps[place] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            created.append(steps[place])
        state["step"] = steps[place]
    for name in names:
        if name not in state:
            state[name] = new.beginning(parameter, name)
            created.append(state[name])
    return state


def set_counts_apart(states: States, sets: Iterable[Iterable[Tensor]]) -> None:
    """Give each set of parameters its own step tensors, to which no update of another set adds."""
    taken: set[int] = set()
    for parameters in sets:
        own: dict[int, Tensor] = {}
        for parameter in parameters:
            if "step" not in (state := states.get(parameter) or {}):
                continue
            count = state["step"]
            if id(count) not in own:
                with torch._C.DisableTorchFunctionSubclass():  # fusion may have armed it
                    own[id(count)] = count.clone() if id(count) in taken else count
            state["step"] = own[id(count)]
        taken |= own.keys()


def place_of(parameter: Tensor, names: tuple[str, ...]) -> Place:
    """Return the place of a parameter with these state tensors."""
    return parameter.device, parameter.dtype, names


def _unsuitable(parameter: Tensor) -> RuntimeError:
    gradient = parameter.grad
    return RuntimeError(
        "the sync-free optimizers need real parameters with dense gradients (got "
        f"{parameter.dtype}, gradient layout {None if gradient is None else gradient.layout}); "
        "use torch.optim for this parameter"
    )


Update = Callable[[Cohort], object]
"""Function that updates a cohort in place."""

_SIZES: Final = (1, 15, 16, 67, 1029)
"""Sizes of scratch tensors: below, at and above SIMD widths, with and without a remainder."""

_TOLERANCE: Final = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


def computes_the_same(kernel: Update, formula: Update, like: Cohort) -> bool:
    """Return whether two steps of the kernel give the formula's result, except for rounding. If
    `like` has `found_inf`, a third step with `found_inf` set must change no bit.
    """
    fused, expected = _scratch(like), _scratch(like)
    for number in (1, 2):
        for cohort, update in ((fused, kernel), (expected, formula)):
            cohort.gradients = [_values(each, number + 2) for each in cohort.parameters]
            update(cohort)
    is_same = [_is_close(a, b) for a, b in zip(_state(fused), _state(expected), strict=True)]
    if fused.found_inf is not None:
        before = [each.clone() for each in _state(fused)]
        fused.found_inf = torch.ones_like(fused.found_inf)
        kernel(fused)
        is_same += [(a == b).all() for a, b in zip(_state(fused), before, strict=True)]
    return all(torch.stack(is_same).tolist())


def _scratch(like: Cohort) -> Cohort:
    first = like.parameters[0]
    tensors = [torch.empty(size, dtype=first.dtype, device=first.device) for size in _SIZES]
    tensors.append(torch.empty(67, 5, dtype=first.dtype, device=first.device).t())
    parameters = [_values(each, 1) for each in tensors]
    slots = [[torch.zeros_like(each) for each in parameters] for _ in like.slots]
    good = None if like.found_inf is None else torch.zeros_like(like.found_inf)
    scale = None if like.grad_scale is None else torch.full_like(like.grad_scale, 2.0)
    return Cohort(
        torch.zeros_like(like.step), parameters, slots=slots, found_inf=good, grad_scale=scale
    )


def _values(like: Tensor, seed: int) -> Tensor:
    """Return numbers of both signs, none near zero, in the layout of another tensor."""
    index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    values = (0.5 + 0.125 * ((index * 5 + seed) % 7)) * (1 - 2 * ((index + seed) % 2))
    return torch.empty_like(like).copy_(values)


def _state(cohort: Cohort) -> Iterable[Tensor]:
    yield cohort.step
    yield from cohort.parameters
    for slot in cohort.slots:
        yield from slot


def _is_close(a: Tensor, b: Tensor) -> Tensor:
    tolerance = _TOLERANCE.get(a.dtype, 3e-2)
    return torch.isclose(a, b, rtol=tolerance, atol=tolerance).all()
