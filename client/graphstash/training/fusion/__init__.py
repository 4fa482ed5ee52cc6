"""Optimizer fusion: updates of parameters inside backward, or right before the next forward.

    fusion = training.fuse(model, optimizer, when="backward")
    for batch in data:                      # the loop stays as it is
        optimizer.zero_grad()
        loss(model, batch).backward()       # updates what has its whole gradient
        optimizer.step()                    # updates what is left
    fusion.close()

Backward fusion frees each gradient when its parameter is updated, so that the gradients of a model
are never in memory together. Forward fusion keeps them, and updates the parameters of a module when
the module is about to run: while they are in the processor's cache. It goes with everything that
needs all gradients first: clipping, a loss scale, accumulation.

The smallest parameters, up to 1 MiB together, are left to `step`.

Both end where the optimizer alone ends, to the bit; where they would not, they refuse. What cannot
be seen when `fuse` is called is seen in the first step, which is made without fusion and watched,
or when later code uses what is updated already or not yet.

Jiang et al., "Optimizer Fusion: Efficient Training with Better Locality and Parallelism", 2021,
arXiv 2104.00237.
"""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from graphstash.training.fusion.backward import BackwardFusion
from graphstash.training.fusion.base import Fusion
from graphstash.training.fusion.errors import FusionError
from graphstash.training.fusion.forward import ForwardFusion

__all__ = ["Fusion", "FusionError", "fuse"]

_KINDS: dict[str, type[Fusion]] = {"backward": BackwardFusion, "forward": ForwardFusion}


def fuse(
    model: nn.Module, optimizer: Optimizer, when: Literal["backward", "forward"] = "backward"
) -> Fusion:
    """Fuses the updates of a model's parameters with its backward or its next forward.

    With `when="backward"`, read gradients in hooks of the parameters, if at all: after `backward`
    they are gone, and an operation that uses one is refused. With `when="forward"`, an operation of
    torch that uses a parameter, and a use of `optimizer.state`, make its update first. Call
    `flush()` before other code uses one, such as torch.func.

    Args:
        model: whose forward is called; on a CPU or on CUDA. With when="backward", the
            DistributedDataParallel around it, where there is one.
        optimizer: of some of the model's parameters: one of this package, or one of torch.optim
            that treats each parameter by itself. The wrapper that Accelerate or Lightning makes of
            one stands for it.
        when: "backward" takes least memory; it needs the gradients of one backward to be final.
            "forward" goes with clipping, a loss scale and accumulation, but not with FSDP2.

    Returns:
        A handle, which is also a context manager.

    Raises:
        FusionError: the result would not be that of the optimizer alone; says why, and what to do.
            Also raised by the first `step()`, before it has changed anything, and later on where
            a parameter is used in a way that would not be exact.
        ValueError: `when` is neither of the two.
    """
    if when not in _KINDS:
        raise ValueError(f'when must be "backward" or "forward" (got {when!r})')
    return _KINDS[when](model, _unwrapped(optimizer))


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
