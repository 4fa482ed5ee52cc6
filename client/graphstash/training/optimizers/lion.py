"""Lion: steps of equal length in every element, by the sign of a running mean.

g is the gradient (negated to maximize):

    p <- p - lr * weight_decay * p
    p <- p - lr * sign(beta1 * m + (1 - beta1) * g)
    m <- beta2 * m + (1 - beta2) * g                   exp_avg

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675, algorithm 2.
Lion has half the state of Adam. The authors advise a learning rate 3 to 10 times smaller than
AdamW's, and a weight decay that is larger by the same factor. torch.optim has no Lion.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.formula import Options, Split, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in

__all__ = ["Lion"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    del step, options
    lr, weight_decay, _, _, rest1, rest2, *_ = old.scalars
    difference = torch._foreach_sub(old.gradients, old.slots[0])
    direction = torch._foreach_add(old.slots[0], torch._foreach_mul(difference, rest1))
    means = torch._foreach_add(old.slots[0], torch._foreach_mul(difference, rest2))
    decayed = torch._foreach_mul(old.parameters, 1 - lr * weight_decay)
    change = torch._foreach_mul(torch._foreach_sign(direction), lr)
    return list(torch._foreach_sub(decayed, change)), [list(means)]


class Lion(SyncFreeOptimizer):
    """Sync-free Lion; the formula is in the module's docstring.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0: the length of a step in every element.
        betas: weight of the old running mean in a step's direction, and in the new running mean,
            in [0, 1).
        weight_decay: decoupled weight decay as in AdamW, >= 0.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. There is no fused kernel.

    Raises:
        ValueError: an argument is out of its range.
    """

    _operation = TracedOp("lion", selecting(_formula))
    _nonnegative = ("lr", "weight_decay")
    _constants = ()
    _moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _uses_step(self, group: Group) -> bool:
        del group
        return False  # state dicts of other Lion implementations contain no step
