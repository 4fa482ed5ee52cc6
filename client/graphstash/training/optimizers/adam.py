"""Adam, AdamW and LAMB: steps scaled by running means of the gradient and of its square.

g is the gradient (negated to maximize), and t the number of steps including this one:

    Adam    g <- g + weight_decay * p
    AdamW   p <- p - lr * weight_decay * p
    m <- beta1 * m + (1 - beta1) * g                   exp_avg
    v <- beta2 * v + (1 - beta2) * g^2                 exp_avg_sq
    w <- max(w, v) if amsgrad, else v                  max_exp_avg_sq
    p <- p - lr / (1 - beta1^t) * m / (sqrt(w) / sqrt(1 - beta2^t) + eps)

The same as `torch.optim.Adam` and `AdamW` (Kingma and Ba, 2015, arXiv 1412.6980; Loshchilov and
Hutter, 2019, arXiv 1711.05101; amsgrad: Reddi et al., 2018, arXiv 1904.09237).

LAMB, for large batches, makes a parameter's step proportional to the parameter's norm. With m and v
as above and norms over one parameter tensor:

    r <- m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
    p <- p - lr * |p| / |r| * r             the ratio is 1 if |p| or |r| is 0 or not finite

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, arXiv
1904.00962, algorithm 2 with phi(z) = z. torch.optim has no LAMB.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.base import Kernel, SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.formula import Options, Split, decayed, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in
from graphstash.training.sharding import Sums, is_flattened

__all__ = ["LAMB", "Adam", "AdamW", "adam_formula", "fused_adam"]


class Moments:
    """The running means after this gradient, one tensor each per parameter, and the corrections of
    their bias towards zero, 1 - beta^t, of shape [].
    """

    def __init__(self, old: Split, gradients: list[Tensor], step: Tensor) -> None:
        _, _, beta1, beta2, rest1, rest2, log1, log2 = old.scalars
        self.mean = list(
            torch._foreach_add(
                torch._foreach_mul(old.slots[0], beta1), torch._foreach_mul(gradients, rest1)
            )
        )
        self.square = list(
            torch._foreach_add(
                torch._foreach_mul(old.slots[1], beta2),
                torch._foreach_mul(torch._foreach_mul(gradients, gradients), rest2),
            )
        )
        # 1 - beta^t in float32 loses half of its digits in early steps, unlike expm1. If the first
        # step is bad (found_inf), t and the corrections are 0, and `selecting` drops the quotients.
        self.correction1 = -torch.expm1(step * log1)
        self.correction2 = -torch.expm1(step * log2)


def adam_formula(
    old: Split, step: Tensor, options: Options
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return new parameters and slots; options are eps, amsgrad and decoupled decay."""
    eps, amsgrad, decoupled = options
    lr, weight_decay = old.scalars[:2]
    parameters, gradients = old.parameters, old.gradients
    if decoupled:
        parameters = list(torch._foreach_mul(parameters, 1 - lr * weight_decay))
    else:
        gradients = decayed(gradients, parameters, weight_decay)
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


def fused_adam(group: Group, cohort: Cohort, *, decoupled: bool) -> Kernel:
    """Return torch's kernel with its arguments: AdamW's if `decoupled`, else Adam's."""
    beta1, beta2 = group["betas"]
    amsgrad = group.get("amsgrad", False)
    return partial(
        torch._fused_adamw_ if decoupled else torch._fused_adam_,
        cohort.parameters,
        cohort.gradients,
        cohort.slots[0],
        cohort.slots[1],
        cohort.slots[2] if amsgrad else [],
        [cohort.step] * len(cohort.parameters),
        beta1=beta1,
        beta2=beta2,
        amsgrad=amsgrad,
        **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
    )


class Adam(SyncFreeOptimizer):
    """Sync-free `torch.optim.Adam`; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0.
        betas: decay of the running means of the gradient and of its square, in [0, 1).
        eps: added to the denominator, >= 0; a constant of the graph.
        weight_decay: L2 penalty, >= 0.
        amsgrad: divide by the largest mean square so far.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`.

    Raises:
        ValueError: an argument is out of its range.
    """

    _operation = TracedOp("adam", selecting(adam_formula))
    _moments = ("exp_avg", "exp_avg_sq")
    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        # torch's state dictionaries tell Adam from AdamW by this key.
        defaults = {**options_in(locals()), "decoupled_weight_decay": self._decoupled}
        super().__init__(params, defaults, **options)

    def _options(self, group: Group) -> Options:
        return (group["eps"], group["amsgrad"], self._decoupled)

    def _slots(self, group: Group) -> tuple[str, ...]:
        return (*self._moments, "max_exp_avg_sq") if group["amsgrad"] else self._moments

    def _fused_kernel(self, group: Group, cohort: Cohort) -> Kernel | None:
        return fused_adam(group, cohort, decoupled=self._decoupled)


class AdamW(Adam):
    """Sync-free `torch.optim.AdamW`: `Adam` with decoupled weight decay, 0.01 by default."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options
        )


def _lamb(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    (eps,) = options
    lr, weight_decay = old.scalars[:2]
    moments = Moments(old, old.gradients, step)
    unbiased = torch._foreach_div(moments.mean, moments.correction1)
    denominator = torch._foreach_add(
        torch._foreach_sqrt(torch._foreach_div(moments.square, moments.correction2)), eps
    )
    direction = decayed(torch._foreach_div(unbiased, denominator), old.parameters, weight_decay)
    parameters = [
        p - lr * _trust(p_norm, r_norm) * r
        for p, r, p_norm, r_norm in zip(
            old.parameters,
            direction,
            _norms(old.parameters, old.shards),
            _norms(direction, old.shards),
            strict=True,
        )
    ]
    return parameters, [moments.mean, moments.square]


def _trust(p_norm: Tensor, r_norm: Tensor) -> Tensor:
    """Return the ratio, or 1 if a norm is 0 or not finite, which would spoil all elements of p."""
    is_ratio = (p_norm > 0) & (r_norm > 0) & p_norm.isfinite() & r_norm.isfinite()
    return torch.where(is_ratio, p_norm / r_norm, 1.0)


def _norms(tensors: Sequence[Tensor], shards: Sums) -> list[Tensor]:
    norms = list(torch._foreach_norm(list(tensors)))
    if not shards:
        return norms
    squares = shards.sums(torch._foreach_mul(norms, norms))
    return list(torch._foreach_sqrt(squares))


class LAMB(SyncFreeOptimizer):
    """Sync-free LAMB; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim. Biases and norms usually get their
            own group with weight_decay 0.
        lr: learning rate, >= 0.
        betas: decay of the running means of the gradient and of its square, in [0, 1).
        eps: added to the denominator, >= 0; a constant of the graph.
        weight_decay: factor of the parameter in the direction of the step, >= 0.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`; there is no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or FullyShardedDataParallel holds a parameter.
    """

    _operation = TracedOp("lamb", selecting(_lamb))
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _check_parameters(self, group: Group) -> None:
        super()._check_parameters(group)
        if any(map(is_flattened, group["params"])):
            raise ValueError(
                "LAMB needs norms of whole parameters, and FullyShardedDataParallel has put them "
                "into flat tensors; shard with fully_shard(), or use AdamW"
            )
