"""Kernels that programs register by `torch.library.Library.impl`, which torch does not give back.

`record` wraps the function right after `import torch`, before other packages register kernels. A
kernel that was registered earlier, or in another way, is missing here. Compare the number of
functions with the number of kernels that the dispatcher lists.

The wrapper remains when the hook is removed: a later hook also needs the kernels before it.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any, Final, NamedTuple

__all__ = ["Kernel", "kernels_by_library", "record"]


class Kernel(NamedTuple):
    """A function that a program registered for an operation, and whether it gets the key set."""

    function: Any
    with_keyset: bool


_recorded: Final[dict[tuple[str, str], list[tuple[weakref.ref[Any], Kernel]]]] = {}
"""By the operation's name and the dispatch key: each kernel, with its library."""


def record() -> None:
    """Record the kernels that programs register from now on. Further calls do nothing."""
    from torch.library import Library  # this module is imported with every torch

    if not hasattr(Library.impl, "__wrapped__"):
        Library.impl = _wrap_impl(Library.impl)  # type: ignore[method-assign] # the seam


def _wrap_impl(impl: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(impl)

    @functools.wraps(impl)
    def register(*arguments: Any, **named: Any) -> None:
        impl(*arguments, **named)
        with suppress(Exception):  # the hook's outermost frame: the count shows that one is missing
            _record_kernel(**signature.bind(*arguments, **named).arguments)

    return register


def _record_kernel(
    self: Any,
    op_name: Any,
    fn: Any,
    dispatch_key: str = "",
    *,
    with_keyset: bool = False,
    **_: Any,
) -> None:
    is_wrapper = isinstance(fn, FunctionType) and fn.__closure__ is not None
    if is_wrapper and str(fn.__globals__.get("__name__")).partition(".")[0] == "torch":
        return  # torch's wrapper, as of `register_autograd`, may hide a program's function
    name = op_name if isinstance(op_name, str) else op_name.name()
    key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
    qualified = f"{self.ns}::{name.rpartition('::')[2]}"
    held = _recorded.setdefault((qualified, key), [])
    held.append((weakref.ref(self), Kernel(fn, with_keyset)))


def kernels_by_library(operation: str, key: str) -> list[Kernel]:
    """Return the registered kernels of an operation for a dispatch key, in order."""
    held = _recorded.get((operation, key), ())
    return [kernel for ref, kernel in held if (library := ref()) and library.m is not None]
