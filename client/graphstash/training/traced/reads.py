"""Reads: notices where Python reads a tensor's value while a step is recorded."""

import traceback
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Reads"]

_READS: Final = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__"),
        *("__index__", "__repr__", "__format__", "__array__", "equal"),
    )
) | {torch.equal, torch.allclose}


class Reads(TorchFunctionMode):
    """While entered, keeps the place of the first read by this thread; what runs stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.first is None and _reads(func, args, result):
            self.first = f"{getattr(func, '__name__', func)} in {_caller()}"
        return result


def _reads(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    if not args or not isinstance(args[0], Tensor) or args[0].device.type == "cpu":
        return False
    moved = isinstance(result, Tensor) and result.device.type == "cpu"
    return moved or func in _READS


def _caller() -> str:
    """The innermost line that is neither torch's nor ours."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inside):
            return f"{frame.filename}:{frame.lineno}"
    return "torch"
