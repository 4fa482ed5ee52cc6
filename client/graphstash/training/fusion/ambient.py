"""Settings of torch on which an update depends, besides its tensors and options."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Ambient", "ambient", "restored"]

_DENORMAL: Final = 5e-324

_core: Any = torch._C
_precision_of: Any = getattr(_core, "_get_fp32_precision_getter", None)
"""Read the precision of one operation of one backend. None: this torch has one common setting."""

_SCOPES: Final = (
    ()
    if _precision_of is None
    else (
        ("generic", "all"),
        *(("cuda", "all"), ("cuda", "matmul")),
        *(("mkldnn", "all"), ("mkldnn", "matmul")),
    )
)
"""Backends and operations, each after the scope from which it inherits its precision."""

_Precision = tuple[str | None, ...]
"""The common precision of float32 matmuls, then the precision of each of `_SCOPES`. The first is
None if it contradicts the backends, because torch then refuses to return it."""

Ambient = tuple[torch.dtype, _Precision, int, bool, tuple[torch.device, ...]]
"""The default dtype, the precision of float32 matmuls, the number of threads, whether denormals are
flushed, and the devices of the active `torch.device` contexts, the innermost last."""


def ambient() -> Ambient:
    """Return the settings that are active in this thread."""
    devices: tuple[torch.device, ...] = ()
    if torch._C._len_torch_function_stack():
        modes = _get_current_function_mode_stack()
        devices = tuple(mode.device for mode in modes if isinstance(mode, DeviceContext))
    return (
        torch.get_default_dtype(),
        _precision(),
        torch.get_num_threads(),
        _DENORMAL * 1.0 == 0.0,  # the processor flushes denormals of Python likewise
        devices,
    )


def restored(settings: Ambient) -> AbstractContextManager[object]:
    """Restore these settings in a context, in which no mode of the caller sees an operation."""
    now = ambient()
    in_dispatch_mode = torch._C._len_torch_dispatch_stack()
    has_only_devices = torch._C._len_torch_function_stack() == len(now[-1])
    if now == settings and has_only_devices and not in_dispatch_mode:
        return nullcontext()
    stack = ExitStack()
    if in_dispatch_mode:
        stack.enter_context(_disable_current_modes())
    stack.callback(_set, now, _get_current_function_mode_stack())
    _set(settings, [DeviceContext(device) for device in settings[-1]])
    return stack


def _set(settings: Ambient, modes: list[torch.overrides.TorchFunctionMode]) -> None:
    dtype, precision, threads, flushes_denormals, _ = settings
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()
    torch.set_default_dtype(dtype)
    if precision != _precision():
        _set_precision(precision)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flushes_denormals)
    for mode in modes:
        _push_mode(mode)


def _precision() -> _Precision:
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:  # the script has set `torch.backends.cuda.matmul.fp32_precision`
        common = None
    return (common, *(_precision_of(*scope) for scope in _SCOPES))


def _set_precision(precision: _Precision) -> None:
    common, *of_scopes = precision
    for scope, wanted in zip(_SCOPES, of_scopes, strict=True):
        if _precision_of(*scope) != wanted:  # an inherited precision stays inherited
            _core._set_fp32_precision_setter(*scope, wanted)
    if common is not None and common != _precision()[0]:  # it pins inherited precisions
        torch.set_float32_matmul_precision(common)
