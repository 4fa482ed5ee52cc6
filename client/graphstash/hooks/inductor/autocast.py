"""Find the type to which autocast casts the arguments of a custom operation, in torch 2.7.

If `register_autocast` is called twice for a device, the dispatcher uses the kernel of the first
call, but `CustomOpDef` stores the type of the second call. torch cannot look up the kernel. So this
module calls the kernel with tensors that raise an exception when they are cast.
"""

from typing import Any, Final

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import _disable_current_modes

from graphstash.hooks.code import UndescribableError

__all__ = ["type_of_autocast"]

_PLACEHOLDERS: Final = {
    "BoolType": False,
    "DeviceObjType": "cpu",
    "FloatType": 0.0,
    "IntType": 0,
    "NumberType": 0,
    "OptionalType": None,
    "StringType": "",
}
"""Arguments that are no tensors, by the kind of their type. For a `torch.dtype`, it is IntType."""


class _CastError(Exception):
    """A tensor was cast to this type, or reached the operation with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Probe(torch.Tensor):
    """A tensor without data, whose device need not exist. Any operation on it raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # torch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch has no type for it
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        raise _CastError((kwargs or {}).get("dtype", torch.float32))


def type_of_autocast(definition: CustomOpDef, device: str) -> torch.dtype | None:
    """Return the type to which autocast casts for a device, or None if no argument is a tensor.

    Raises:
        UndescribableError: the type cannot be found.
    """
    operation = definition._opoverload
    types = [each.type for each in operation._schema.arguments]
    if not any("Tensor" in str(each) for each in types):
        return None
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    try:
        with _disable_current_modes(), torch.inference_mode(mode=False):
            probe = _Probe._make_wrapper_subclass(  # type: ignore[attr-defined] # torch
                _Probe, (1,), dtype=torch.float32, device=device
            )
            arguments = [_make_argument(each, probe) for each in types]
            operation.redispatch(torch._C.DispatchKeySet(key), *arguments)
    except _CastError as cast:
        return cast.dtype
    except Exception as error:
        raise UndescribableError(f"the autocast of {operation.name()} is not known") from error
    raise UndescribableError(f"the autocast of {operation.name()} casts no tensor")


def _make_argument(kind: Any, probe: torch.Tensor) -> Any:
    if "Tensor" not in str(kind):
        return [] if kind.kind() == "ListType" else _PLACEHOLDERS[kind.kind()]
    if kind.kind() == "TensorType":
        return probe
    element = _make_argument(kind.getElementType(), probe)
    return [element] if kind.kind() == "ListType" else element
