"""Adam and AdamW: steps scaled by running means of the gradient and of its square.

With g the gradient (negated to maximize) and t the number of steps with this one:

    Adam    g <- g + weight_decay * p
    AdamW   p <- p - lr * weight_decay * p
    m <- beta1 * m + (1 - beta1) * g                   exp_avg
    v <- beta2 * v + (1 - beta2) * g^2                 exp_avg_sq
    w <- max(w, v) if amsgrad, else v                  max_exp_avg_sq
    p <- p - lr / (1 - beta1^t) * m / (sqrt(w) / sqrt(1 - beta2^t) + eps)

The same as `torch.optim.Adam` and `AdamW` (Kingma and Ba, 2015, arXiv 1412.6980; Loshchilov and
Hutter, 2019, arXiv 1711.05101; amsgrad: Reddi et al., 2018, arXiv 1904.09237).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphstash.training.operation import Operation
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.moments import MomentOptimizer, Moments
from graphstash.training.optimizers.update import Options, Split, selecting

__all__ = ["Adam", "AdamW"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    eps, amsgrad, maximize, decoupled = options
    lr, weight_decay = old.scalars[:2]
    parameters = old.parameters
    gradients = list(torch._foreach_neg(old.gradients)) if maximize else old.gradients
    if decoupled:
        parameters = list(torch._foreach_mul(parameters, 1 - lr * weight_decay))
    else:
        decay = torch._foreach_mul(parameters, weight_decay)
        gradients = list(torch._foreach_add(gradients, decay))
    moments = Moments(old, gradients, step)
    slots = [moments.mean, moments.square]
    if amsgrad:
        slots.append(list(torch._foreach_maximum(old.slots[2], moments.square)))
    denominator = torch._foreach_add(
        torch._foreach_div(torch._foreach_sqrt(slots[-1]), moments.correction2.sqrt()), eps
    )
    change = torch._foreach_mul(
        torch._foreach_div(moments.mean, denominator), lr / moments.correction1
    )
    return list(torch._foreach_sub(parameters, change)), slots


class _AdamLike(MomentOptimizer):
    """Adam and AdamW differ in one line of the formula."""

    _operation = Operation("adam", selecting(_formula))
    _decoupled: bool

    def __init__(  # noqa: PLR0917 - torch.optim's order
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                # What torch calls the difference between the two in its state dictionaries.
                "decoupled_weight_decay": self._decoupled,
            },
            fused=fused,
        )

    def _options(self, group: Mapping[str, Any]) -> Options:
        return (group["eps"], group["amsgrad"], group["maximize"], self._decoupled)

    def _update_fused(
        self,
        group: Mapping[str, Any],
        cohort: Cohort,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> bool:
        cohort.step += 1.0 if found_inf is None else (found_inf == 0).to(cohort.step.dtype)
        kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
        beta1, beta2 = group["betas"]
        kernel(
            cohort.parameters,
            cohort.gradients,
            cohort.slots[0],
            cohort.slots[1],
            cohort.slots[2] if group["amsgrad"] else [],
            [cohort.step] * len(cohort.parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=None if found_inf is None else (found_inf != 0).float(),
        )
        return True


class Adam(_AdamLike):
    """Sync-free `torch.optim.Adam`; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0.
        betas: decay of the running means of the gradient and of its square, in [0, 1).
        eps: added to the denominator, >= 0; part of the graph.
        weight_decay: L2 penalty, >= 0.
        amsgrad: divide by the largest mean square so far.
        maximize: go up instead of down.
        fused: False: never use torch's fused kernels on plain torch, where they are exact and fast.

    Raises:
        ValueError: an argument is out of its range.
    """

    _decoupled = False


class AdamW(_AdamLike):
    """Sync-free `torch.optim.AdamW`: as `Adam`, with weight decay beside the gradient.

    Args and errors as for `Adam`; weight_decay is 0.01 when nothing else is said, as in torch.
    """

    _decoupled = True

    def __init__(  # noqa: PLR0917 - torch.optim's order
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused
        )
