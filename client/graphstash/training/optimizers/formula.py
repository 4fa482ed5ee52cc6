"""Formulas of updates, and the selection between their results and the old values.

See `SyncFreeOptimizer`, which applies them.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphstash.training.device import Shapes
from graphstash.training.sharding import Sums

__all__ = ["Formula", "Layout", "Options", "Split", "can_be_squared", "decayed", "selecting"]

Options = tuple[Any, ...]
"""Option values that are constants of the graph."""


class Layout(NamedTuple):
    """Everything that determines the graph of an update."""

    options: Options
    select: bool
    unscale: bool
    maximize: bool
    scalar_count: int
    slot_count: int
    parameters: Shapes
    shards: Sums
    master: bool


class Split(NamedTuple):
    """The inputs of an update. `gradients`, `parameters` and each slot have equal lengths."""

    scalars: list[Tensor]  # each []
    gradients: list[Tensor]  # negated if the loss is maximized
    step: Tensor  # [], the number of earlier good steps
    parameters: list[Tensor]
    slots: list[list[Tensor]]
    found_inf: Tensor | None  # []
    shards: Sums
    dtype: torch.dtype  # of the stored parameters; float32 with master weights
    may_overwrite: bool
    """Whether the formula may write new values over the parameters and slots, to save copies."""


Formula = Callable[[Split, Tensor, Options], tuple[list[Tensor], list[list[Tensor]]]]
"""`formula(old, step, options)` returns new parameters and slots. `step` counts good steps,
and this step if it is good."""


def selecting(formula: Formula) -> Callable[[list[Tensor], Layout], list[Tensor]]:
    """Return a function that applies a formula, but returns the old values on a bad step.

    Its first argument is a flat list of the tensors in the order of `Split`, then of the loss scale
    if the gradients are still scaled. It returns step, parameters and slots.
    """

    def update(inputs: list[Tensor], layout: Layout) -> list[Tensor]:
        old = _split(inputs, layout)
        good = old.found_inf == 0 if old.found_inf is not None else None
        step = old.step + (1.0 if good is None else good.to(old.step.dtype))
        if layout.master:
            *slots, kept = old.slots
            # Parameters may change between the creation of state and the first good step.
            master = [
                torch.where(step == 1, new.float(), wide)
                for new, wide in zip(old.parameters, kept, strict=True)
            ]
            wide = old._replace(parameters=master, slots=slots)
            parameters, slots = formula(wide, step, layout.options)
            slots = [*slots, parameters]
        else:
            slots = [list(map(_widened, slot)) for slot in old.slots]
            wide = old._replace(parameters=list(map(_widened, old.parameters)), slots=slots)
            parameters, slots = formula(wide, step, layout.options)
        before = old.parameters + [tensor for slot in old.slots for tensor in slot]
        after = parameters + [tensor for slot in slots for tensor in slot]
        if good is not None:
            after = [torch.where(good, new, kept) for new, kept in zip(after, before, strict=True)]
        # A float32 scalar widens bfloat16 parameters of shape []. Restore their dtype.
        after = [new.to(kept.dtype) for new, kept in zip(after, before, strict=True)]
        return [step, *after]

    return update


def _widened(tensor: Tensor) -> Tensor:
    """Widen float16 to float32: an eps of 1e-8 is 0 in float16, and 0 / 0 would be NaN.

    Small moments still underflow when they are stored as float16, unless `master_weights` is on.
    """
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _split(inputs: list[Tensor], layout: Layout) -> Split:
    count = len(layout.parameters)
    scalars, rest = inputs[: layout.scalar_count], inputs[layout.scalar_count :]
    gradients, rest = rest[:count], rest[count:]
    step, tensors = rest[0], rest[1:]
    lists = [tensors[n * count : (n + 1) * count] for n in range(1 + layout.slot_count)]
    extra = tensors[(1 + layout.slot_count) * count :]
    found_inf = extra[0] if layout.select else None
    gradients = [g.float() if layout.master else _widened(g) for g in gradients]
    if layout.unscale:
        gradients = list(torch._foreach_mul(gradients, extra[-1].reciprocal()))
    if layout.maximize:
        gradients = list(torch._foreach_neg(gradients))
    dtype = torch.float32 if layout.master else layout.parameters[0][1]
    is_plain = lists[0][0].device.type == "cpu" and not torch.compiler.is_compiling()
    return Split(
        *(scalars, gradients, step, lists[0], lists[1:], found_inf, layout.shards, dtype),
        may_overwrite=is_plain and not layout.select,
    )


def can_be_squared(gradient: Tensor) -> Tensor:
    """Return whether the sum of the gradient's squares is finite, as a bool tensor of shape [].

    Otherwise an optimizer's sums of squares overflow to inf and become NaN at the next step. The
    sum of all squares bounds the product of any two elements. Call this for each parameter alone:
    its result must not depend on the parameters that are updated with it.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return torch.isfinite(norm.square())


def decayed(
    gradients: Iterable[Tensor], parameters: Iterable[Tensor], weight_decay: Tensor
) -> list[Tensor]:
    """Return gradients + weight_decay * parameters, or the gradients if weight_decay is 0: infinity
    in a parameter, such as an attention mask, times 0 is NaN.
    """
    is_off = weight_decay == 0
    gradients = list(gradients)
    sums = torch._foreach_add(gradients, torch._foreach_mul(list(parameters), weight_decay))
    pairs = zip(gradients, sums, strict=True)
    return [torch.where(is_off, gradient, both) for gradient, both in pairs]
