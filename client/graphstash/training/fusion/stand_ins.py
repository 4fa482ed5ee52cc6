"""StandIn: takes the place of a freed gradient, without memory.

Without fusion, gradients stay until zero_grad(): a loop may clip them, log their norm, remove them
before the step, or add to them in the next backward. With fusion, they are freed. If code, even
torch's own, uses the values of a freed gradient, its stand-in raises an error.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["StandIn", "stand_in_for"]

_CONVERT: Final = torch.ops.aten._to_copy.default
"""The operation with which module.to() converts parameters and their gradients."""


class StandIn(Tensor):
    """A tensor without values; `stand_in_for` creates it."""

    refuse: Callable[[str], None]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # torch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch has no type for it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this in place of each operation that has a stand-in as an argument."""
        del types
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        for stand_in in given:
            stand_in.refuse(func.overloadpacket.__name__)
        if func is not _CONVERT:
            raise RuntimeError(f"{func} uses a gradient that optimizer fusion has freed")
        first, options = given[0], kwargs or {}
        zero = torch.zeros(
            (), dtype=options.get("dtype", first.dtype), device=options.get("device", first.device)
        )
        return zero.expand(first.shape)

    def __repr__(self) -> str:  # type: ignore[override] # without the values
        return f"StandIn(shape={tuple(self.shape)})"


def stand_in_for(parameter: Tensor, refuse: Callable[[str], None]) -> StandIn:
    """Return a stand-in with the shape, type and device of a parameter.

    Args:
        parameter: the parameter whose gradient was freed.
        refuse: called with the name of the operation that uses the gradient's values. Raises,
            except for a conversion after the step. Must not hold the parameter strongly.
    """
    stand_in: StandIn = StandIn._make_wrapper_subclass(  # type: ignore[attr-defined] # torch
        StandIn,
        parameter.shape,
        strides=parameter.stride(),
        dtype=parameter.dtype,
        device=parameter.device,
    )
    stand_in.refuse = refuse
    return stand_in
