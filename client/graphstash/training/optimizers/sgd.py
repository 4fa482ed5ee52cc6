"""SGD: stochastic gradient descent with momentum.

With g the gradient (negated to maximize) and t the number of steps with this one:

    g <- g + weight_decay * p
    b <- g                                        if t = 1
         momentum * b + (1 - dampening) * g       otherwise
    g <- g + momentum * b  if nesterov, else b
    p <- p - lr * g

The same as `torch.optim.SGD` (Sutskever et al., "On the importance of initialization and momentum
in deep learning", 2013, as torch writes it); the buffer begins with the first step that counts, be
it the first or not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphstash.training.operation import Operation
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.update import Options, Split, selecting

__all__ = ["SGD"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    nesterov, maximize = options
    lr, weight_decay, momentum, dampening = old.scalars
    gradients = list(torch._foreach_neg(old.gradients)) if maximize else old.gradients
    decay = torch._foreach_mul(old.parameters, weight_decay)
    gradients = list(torch._foreach_add(gradients, decay))
    slots: list[list[Tensor]] = []
    if old.slots:
        running = torch._foreach_add(
            torch._foreach_mul(old.slots[0], momentum),
            torch._foreach_mul(gradients, 1 - dampening),
        )
        first = step <= 1
        buffers = [
            torch.where(first, new, kept) for new, kept in zip(gradients, running, strict=True)
        ]
        slots = [buffers]
        ahead = torch._foreach_mul(buffers, momentum)
        gradients = list(torch._foreach_add(gradients, ahead)) if nesterov else buffers
    return list(torch._foreach_sub(old.parameters, torch._foreach_mul(gradients, lr))), slots


class SGD(SyncFreeOptimizer):
    """Sync-free `torch.optim.SGD`; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0.
        momentum: >= 0; 0 keeps no buffer.
        dampening: of the gradient that enters the buffer.
        weight_decay: L2 penalty, >= 0.
        nesterov: needs a momentum and no dampening.
        maximize: go up instead of down.
        fused: False: never use torch's fused kernels on plain torch, where they are exact and fast.

    Raises:
        ValueError: an argument is out of its range.
    """

    _operation = Operation("sgd", selecting(_formula))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not isinstance(value, Tensor) and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and dampening 0; they are {momentum} and "
                f"{dampening}"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            },
            fused=fused,
        )

    def _scheduled(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        names = ("lr", "weight_decay", "momentum", "dampening")
        return {name: group[name] for name in names}

    def _options(self, group: Mapping[str, Any]) -> Options:
        return (group["nesterov"], group["maximize"])

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _update_fused(
        self,
        group: Mapping[str, Any],
        cohort: Cohort,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> bool:
        if cohort.slots and group["dampening"] != 0:
            return False  # the kernel must be told from the host which step is the first
        cohort.step += 1.0 if found_inf is None else (found_inf == 0).to(cohort.step.dtype)
        torch._fused_sgd_(
            cohort.parameters,
            cohort.gradients,
            cohort.slots[0] if cohort.slots else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            # A buffer of zeros: momentum * 0 + g is what the first step asks for.
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=None if found_inf is None else (found_inf != 0).float(),
        )
        return True

    def _step_of(self, state: Mapping[str, Any]) -> float:
        return 0.0 if state.get("momentum_buffer") is None else 1.0
