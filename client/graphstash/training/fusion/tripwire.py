"""Tripwire: call a function before torch uses the values of chosen tensors.

An armed tensor gets a class whose `__torch_function__` torch calls before each operation on it.
Torch changes classes likewise when it materializes a lazy module's parameters. Code that reaches
the memory through an earlier view or an address does not trip; `is_held` finds such views.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Tripwire", "is_held"]

_PROPERTIES: Final = (
    *("grad", "requires_grad", "is_leaf", "grad_fn", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "shape", "device", "dtype", "layout", "ndim", "is_cpu"),
    *("is_cuda", "is_meta", "is_sparse", "_version", "itemsize", "nbytes", "names", "output_nr"),
)
"""Properties of a tensor; torch 2.15 has no `names`."""
_GRAD: Final[Any] = Tensor.grad
_HARMLESS: Final = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(_GRAD.__set__, _GRAD.__delete__),
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement),
        *(Tensor.element_size, Tensor.is_floating_point, Tensor.requires_grad_, Tensor.ndimension),
        *(Tensor.is_contiguous, Tensor.is_complex, Tensor.is_signed, Tensor.storage_offset),
        *(Tensor.get_device, Tensor.__len__, Tensor.is_inference, Tensor._is_view),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like),
        *(torch.rand_like, torch.randn_like, Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones),
    )
)
"""Operations of torch that neither read nor write a tensor's values."""


class Tripwire:
    """Calls `on_use` before torch reads or writes the values of an armed tensor.

    Args:
        on_use: bound method, called with the tensor. Must disarm it or raise. Held weakly.
    """

    def __init__(self, on_use: Callable[[Tensor], None]) -> None:
        method = weakref.WeakMethod(on_use)
        self._armed: Mapping[type, type] = {
            kind: _armed(kind, method) for kind in (Tensor, nn.Parameter)
        }
        self._bases = {armed: kind for kind, armed in self._armed.items()}

    def arm(self, tensor: Tensor) -> bool:
        """Arm a plain tensor or parameter, and return whether it is armed; subclasses are not."""
        if (armed := self._armed.get(type(tensor))) is not None:
            tensor.__class__ = armed
        return type(tensor) in self._bases

    def disarm(self, tensor: Tensor) -> None:
        """Restore the tensor's own class."""
        if (kind := self._bases.get(type(tensor))) is not None:
            tensor.__class__ = kind


def is_held(tensor: Tensor) -> bool:
    """Return whether another tensor shares memory with this unsharded one.

    Examples: a view, `detach()`, `.data`, and a graph that backward has not freed yet.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count > 1


def _armed(kind: type[Tensor], on_use: "weakref.WeakMethod[Callable[[Tensor], None]]") -> type:
    def trip(tensor: Tensor) -> None:
        if (call := on_use()) is None:  # the owner of `on_use` no longer exists
            tensor.__class__ = kind
        else:
            call(tensor)

    class Armed(kind):  # type: ignore[misc,valid-type] # the base is a variable
        __slots__ = ()

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            kwargs = kwargs or {}
            if func in _HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is cls:
                    trip(leaf)
            return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            trip(self)
            return copy.deepcopy(self, memo)

    Armed.__name__, Armed.__qualname__ = kind.__name__, kind.__qualname__
    Armed.__module__ = kind.__module__
    return Armed
