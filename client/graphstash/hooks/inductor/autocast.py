"""Find the type to which autocast casts the arguments of a custom operation, in torch 2.7.

There, the dispatcher keeps the kernel of the first `register_autocast` for a device, and the
`CustomOpDef` keeps the type of the last one. torch has no means to look up the kernel. So this
module calls it, with tensors that end the call when they are cast.
"""

from typing import Any, Final

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import _disable_current_modes

from graphstash.hooks.code import UndescribableError

__all__ = ["type_of_autocast"]

_PLAIN: Final = {
    "BoolType": False,
    "DeviceObjType": "cpu",
    "FloatType": 0.0,
    "IntType": 0,
    "NumberType": 0,
    "OptionalType": None,
    "StringType": "",
}
"""Arguments by the kind of their type. The type of a `torch.dtype` is an int."""


class _CastError(Exception):
    """A tensor was cast to a type, or reached the operation with its own type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Probe(torch.Tensor):
    """A tensor without content, which may belong to an absent device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # torch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch has no type for it
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        raise _CastError((kwargs or {}).get("dtype", torch.float32))


def type_of_autocast(definition: CustomOpDef, device: str) -> torch.dtype | None:
    """Return the type to which the kernel for a device casts, or None if no argument is a tensor.

    Raises:
        UndescribableError: the type is not known.
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
            arguments = [_argument(each, probe) for each in types]
            operation.redispatch(torch._C.DispatchKeySet(key), *arguments)
    except _CastError as cast:
        return cast.dtype
    except Exception as error:
        raise UndescribableError(f"the autocast of {operation.name()} is not known") from error
    raise UndescribableError(f"the autocast of {operation.name()} casts no tensor")


def _argument(kind: Any, probe: torch.Tensor) -> Any:
    if "Tensor" not in str(kind):
        return [] if kind.kind() == "ListType" else _PLAIN[kind.kind()]
    if kind.kind() == "TensorType":
        return probe
    element = _argument(kind.getElementType(), probe)
    return [element] if kind.kind() == "ListType" else element
