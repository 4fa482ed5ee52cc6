"""The pure part of an optimizer: new values from old ones, and the choice between the two."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphstash.training.operation import Shapes

__all__ = ["Formula", "Layout", "Options", "Split", "selecting"]

Options = tuple[Any, ...]
"""What of an optimizer's settings is part of the graph."""


class Layout(NamedTuple):
    """What the shape of an update depends on."""

    options: Options
    select: bool
    unscale: bool
    scalar_count: int
    slot_count: int
    parameters: Shapes


class Split(NamedTuple):
    """The inputs of an update; every list beside `scalars` has one tensor per parameter."""

    scalars: list[Tensor]  # each []
    gradients: list[Tensor]
    step: Tensor  # [], the number of steps before this one
    parameters: list[Tensor]
    slots: list[list[Tensor]]
    found_inf: Tensor | None  # []


Formula = Callable[[Split, Tensor, Options], tuple[list[Tensor], list[list[Tensor]]]]
"""`formula(old, step, options)` gives new parameters and slots; step is 1 in the first update."""


def selecting(formula: Formula) -> Callable[[list[Tensor], Layout], list[Tensor]]:
    """Makes a formula into a function of one list that leaves everything alone on a bad step.

    The list has the inputs in the order of `Split`, and the loss scale by which the gradients are
    still to be divided as its last element, if there is one. The result is step, parameters, slots.
    """

    def update(inputs: list[Tensor], layout: Layout) -> list[Tensor]:
        old = _split(inputs, layout)
        good = old.found_inf == 0 if old.found_inf is not None else None
        step = old.step + (1.0 if good is None else good.to(old.step.dtype))
        parameters, slots = formula(old, step, layout.options)
        before = old.parameters + [tensor for slot in old.slots for tensor in slot]
        after = parameters + [tensor for slot in slots for tensor in slot]
        if good is not None:
            after = [torch.where(good, new, kept) for new, kept in zip(after, before, strict=True)]
        # A number in a wider type than a parameter's makes a parameter of shape [] wider, too.
        after = [new.to(kept.dtype) for new, kept in zip(after, before, strict=True)]
        return [step, *after]

    return update


def _split(inputs: list[Tensor], layout: Layout) -> Split:
    count = len(layout.parameters)
    scalars, rest = inputs[: layout.scalar_count], inputs[layout.scalar_count :]
    gradients, rest = rest[:count], rest[count:]
    step, tensors = rest[0], rest[1:]
    lists = [tensors[n * count : (n + 1) * count] for n in range(1 + layout.slot_count)]
    extra = tensors[(1 + layout.slot_count) * count :]
    found_inf = extra[0] if layout.select else None
    if layout.unscale:
        gradients = list(torch._foreach_mul(gradients, extra[-1].reciprocal()))
    return Split(scalars, gradients, step, lists[0], lists[1:], found_inf)
