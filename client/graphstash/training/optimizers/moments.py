"""What Adam, AdamW and LAMB share: running means of the gradient and of its square."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.update import Split

__all__ = ["MomentOptimizer", "Moments"]


class Moments:
    """The means after one more gradient, and what removes their bias towards zero.

    Attributes:
        mean, square: one tensor per parameter.
        correction1, correction2: [], 1 - beta^t.
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
        # 1 - beta^t in float32 would lose half of its digits at the start. On a bad first step t is
        # 0 and the corrections are, too; nobody takes the quotients.
        self.correction1 = -torch.expm1(step * log1)
        self.correction2 = -torch.expm1(step * log2)


class MomentOptimizer(SyncFreeOptimizer):
    """Base of the optimizers with moments: their common arguments, and their state."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, fused: bool | None) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = defaults[name]
            if not isinstance(value, Tensor) and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        for number, beta in enumerate(defaults["betas"]):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{number}] is {beta}; it must be 0 or more and below 1")
        super().__init__(params, defaults, fused=fused)

    def _scheduled(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            # Computed here, in the host's double precision.
            "1 - beta1": 1 - beta1,
            "1 - beta2": 1 - beta2,
            "log beta1": math.log(beta1) if beta1 else -math.inf,
            "log beta2": math.log(beta2) if beta2 else -math.inf,
        }

    def _slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
