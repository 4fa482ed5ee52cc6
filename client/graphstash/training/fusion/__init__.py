"""Optimizer fusion: update parameters inside backward, or right before the next forward.

    fusion = training.fuse(model, optimizer, when="backward")
    for batch in data:                      # the loop does not change
        optimizer.zero_grad()
        loss(model, batch).backward()       # updates parameters whose gradient is complete
        optimizer.step()                    # updates the rest
    fusion.close()

Backward fusion frees each gradient once its parameter is updated, so the gradients of a model are
never all in memory. Forward fusion keeps them, and updates a module's parameters right before the
module reads them from the processor's cache. It supports everything that needs all
gradients first: clipping, a loss scale, accumulation. `step` itself updates the smallest
parameters, up to 1 MiB together.

Both kinds give the same bits as the optimizer without fusion, or raise FusionError. `fuse` checks
what it can, the first step runs without fusion and is watched, and later uses of a parameter before
or after its update are detected when they happen.

Jiang et al., "Optimizer Fusion: Efficient Training with Better Locality and Parallelism", 2021,
arXiv 2104.00237.
"""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from graphstash.training.fusion.backward import BackwardFusion
from graphstash.training.fusion.base import Fusion
from graphstash.training.fusion.forward import ForwardFusion
from graphstash.training.fusion.parameters import FusionError

__all__ = ["Fusion", "FusionError", "fuse"]

_KINDS: dict[str, type[Fusion]] = {"backward": BackwardFusion, "forward": ForwardFusion}


def fuse(
    model: nn.Module, optimizer: Optimizer, when: Literal["backward", "forward"] = "backward"
) -> Fusion:
    """Fuse the updates of a model's parameters with its backward or its next forward.

    With `when="backward"`, gradients are gone after `backward`, and using one raises FusionError.
    Read gradients in hooks of the parameters. With `when="forward"`, a torch operation on a
    parameter or its state first makes that parameter's update, and a use of `optimizer.state` makes
    all of them.
    Call `flush()` before other code, such as torch.func, uses a parameter.

    If another object holds a parameter's memory (a view, `.data`, an array of NumPy, a DLPack
    capsule), `step()` makes its update. Code that has only an address (`data_ptr()`,
    `__array_interface__`, ctypes) is not detected, nor is `torch.utils.dlpack.to_dlpack(parameter)`
    between `step()` and the next forward, or under DDP: call `flush()` before it, and do not use an
    address between `backward()` and `step()`.

    Args:
        model: the module whose forward is called, on a CPU or on CUDA. With when="backward", pass
            the DistributedDataParallel around it, if there is one.
        optimizer: an optimizer of this package or of torch.optim that updates each parameter
            independently, also in Accelerate's or Lightning's wrapper.
        when: "backward" uses the least memory; the gradients of one backward must be final.
            "forward" supports clipping, a loss scale and accumulation, but not FSDP2.

    Returns:
        The fusion, which is also a context manager.

    Raises:
        FusionError: the result would differ from that of the optimizer without fusion. The message
            gives the reason and a remedy. The first `step()` also raises it, before it changes
            anything, and so do later uses of a parameter that would not be exact.
        ValueError: `when` is neither "backward" nor "forward".
    """
    if when not in _KINDS:
        raise ValueError(f'when must be "backward" or "forward" (got {when!r})')
    return _KINDS[when](model, _unwrapped(optimizer))


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
