"""Compare: whether two recorded steps are the same graph over the same things."""

from typing import Any

import torch
from torch import Tensor

from graphstash.training.traced.bindings import XLA
from graphstash.training.traced.record import Record

__all__ = ["difference"]


def difference(old: Record, new: Record) -> str | None:
    """Says in what two consecutive steps differ; None: in nothing that a graph depends on.

    Reads the frozen values from the device: numbers, and tensors that were made anew.
    """
    if old.graph != new.graph:
        return (
            "its graph differs from one step to the next; Python code of the function decides what "
            "is computed"
        )
    if (old.arguments, old.targets, old.new_grads, old.cleared) != (
        *(new.arguments, new.targets, new.new_grads, new.cleared),
    ):
        return "its graph is computed from, or into, other tensors from one step to the next"
    for (kind, _), before, after in zip(old.arguments, old.values, new.values, strict=True):
        if kind == "frozen" and (values := _different(before, after)):
            return (
                f"Python gives the device {values[0]} in one step and {values[1]} in the next (a "
                "learning rate, a step count, a random number?); make it a tensor on the device in "
                "`state` or in the batch, or use the optimizers of graphstash.training"
            )
    if old.nesting != new.nesting or len(old.results) != len(new.results):
        return "the function returns something of another structure from one step to the next"
    for result, other in zip(old.results, new.results, strict=True):
        if _result_differs(result, other):
            return f"the function returns {result[1]} in one step and {other[1]} in the next"
    return None


def _different(before: Tensor, after: Tensor) -> tuple[str, str] | None:
    same_data = XLA._unique_id_for_ir_and_data(before) == XLA._unique_id_for_ir_and_data(after)
    if same_data:
        return None
    first, second = XLA._xla_get_cpu_tensors([before, after])
    if first.numel() == 1 == second.numel():
        # By their bits: NaN is the same as NaN, and 0 is not -0.
        same = first.numpy().tobytes() == second.numpy().tobytes()
        return None if same else (f"{first.item():.9g}", f"{second.item():.9g}")
    if first.shape == second.shape and torch.equal(first, second):
        return None
    return (f"a tensor {list(first.shape)}", f"another one {list(second.shape)}")


def _result_differs(before: tuple[str, Any], after: tuple[str, Any]) -> bool:
    if before[0] == after[0] == "constant" and isinstance(before[1], Tensor):
        return not isinstance(after[1], Tensor) or _different(before[1], after[1]) is not None
    return before != after
