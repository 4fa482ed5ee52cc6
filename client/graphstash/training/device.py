"""What torch_xla wants done differently: uploads, new values for old tensors, state at rest.

On a lazy device everything that a step touches is either recorded or already there. A tensor that
was only moved to the device is neither: the first step that uses it makes a constant of a small
number, or memory that must not be reused of anything else, and so gets a graph of its own, compiled
at full price, that no later step has.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["assign", "donates", "materialize", "settle", "torch_xla_functions", "upload"]


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors from the host; on torch_xla in one transfer, and they are there afterwards."""
    if device.type != "xla":
        # CUDA copies a few bytes of ordinary memory aside before the call returns.
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    uploaded: list[Tensor] = torch_xla_functions()._xla_tensors_from_aten(
        list(tensors), [str(device)] * len(tensors)
    )
    return uploaded


def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Gives `targets` new values; they stay the same objects. Call it under `no_grad`.

    On torch_xla whatever came from `detach()`, `.data` or `state_dict()` follows; other views keep
    the value that they had, as under torch_xla's own optimizers.
    """
    if not targets:
        return
    lazy = targets[0].device.type == "xla" and torch._is_functional_tensor(targets[0])
    if lazy:
        # Below functionalization this records nothing; the new value takes the old one's memory.
        targets = [torch._from_functional_tensor(target) for target in targets]
        values = [torch._from_functional_tensor(value) for value in values]
    torch._foreach_copy_(list(targets), list(values))
    if lazy and not donates():
        for target, value in zip(targets, values, strict=True):
            torch._propagate_xla_data(value, target)  # says that it has memory of its own


@cache
def donates() -> bool:
    """Whether a graph on torch_xla may write a tensor's new value over the old one.

    Not on a CPU: XLA copies there what is still read when it is overwritten, and AdamW's pass over
    4 M parameters took 1.6 times as long (28.7 against 18.2 ms of CPU time).
    """
    import torch_xla.runtime as xr

    return bool(xr.device_type() != "CPU")


@torch.no_grad()
def materialize(tensors: Sequence[Tensor]) -> None:
    """Puts tensors at rest: computed if they were only recorded so far, and free to be overwritten.

    Then the first step has the same graph as the second, to which they are plain inputs.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        # A number that was only moved to the device shares its memory with all that are equal.
        for number in ours:
            if number.dim() == 0:
                number.data = number.clone()
        torch_xla_functions()._xla_sync_multi(ours, [], wait=False)


@torch.no_grad()
def settle(tensors: Sequence[Tensor]) -> None:
    """Gives tensors that were loaded memory of their own, as they had when training began.

    Then a run that goes on has the graphs of the run before it, and compiles nothing. A graph's
    results are in the order in which its tensors came to be, which stays as it is among these. May
    read the device.
    """
    ours = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if ours:
        ours.sort(key=torch_xla_functions()._xla_get_tensor_id)
        hosts = [tensor.detach().cpu() for tensor in ours]
        for tensor, uploaded in zip(ours, upload(hosts, ours[0].device), strict=True):
            tensor.data = uploaded


def torch_xla_functions() -> Any:
    """torch_xla's native functions, which have no public names."""
    import torch_xla

    return torch_xla._XLAC
