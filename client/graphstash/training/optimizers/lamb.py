"""LAMB: Adam whose step is as long as a share of the parameter it changes, for large batches.

With g the gradient (negated to maximize), t the number of steps with this one, and norms over one
parameter tensor:

    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    r <- m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
    p <- p - lr * |p| / |r| * r             the ratio is 1 where |p| or |r| is 0

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
arXiv 1904.00962, algorithm 2 with phi(z) = z. There is no LAMB in torch.optim.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphstash.training.operation import Operation
from graphstash.training.optimizers.moments import MomentOptimizer, Moments
from graphstash.training.optimizers.update import Options, Split, selecting

__all__ = ["LAMB"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    eps, maximize = options
    lr, weight_decay = old.scalars[:2]
    gradients = list(torch._foreach_neg(old.gradients)) if maximize else old.gradients
    moments = Moments(old, gradients, step)
    unbiased = torch._foreach_div(moments.mean, moments.correction1)
    denominator = torch._foreach_add(
        torch._foreach_sqrt(torch._foreach_div(moments.square, moments.correction2)), eps
    )
    direction = torch._foreach_add(
        torch._foreach_div(unbiased, denominator), torch._foreach_mul(old.parameters, weight_decay)
    )
    parameters = [
        p - lr * torch.where((p_norm > 0) & (r_norm > 0), p_norm / r_norm, 1.0) * r
        for p, r, p_norm, r_norm in zip(
            old.parameters,
            direction,
            torch._foreach_norm(old.parameters),
            torch._foreach_norm(direction),
            strict=True,
        )
    ]
    return parameters, [moments.mean, moments.square]


class LAMB(MomentOptimizer):
    """Sync-free LAMB; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim. Biases and norms usually get a
            group of their own with weight_decay 0.
        lr: learning rate, >= 0.
        betas: decay of the running means of the gradient and of its square, in [0, 1).
        eps: added to the denominator, >= 0; part of the graph.
        weight_decay: >= 0.
        maximize: go up instead of down.

    Raises:
        ValueError: an argument is out of its range.
    """

    _operation = Operation("lamb", selecting(_formula))

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, fused=None)

    def _options(self, group: Mapping[str, Any]) -> Options:
        return (group["eps"], group["maximize"])
