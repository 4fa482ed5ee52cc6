"""SOAP: Adam in the basis of the eigenvectors of Shampoo's statistics.

G is the gradient of shape [d1, ..., dn] (negated to maximize). For each dimension i, G Gᵀ [di, di]
sums over all other dimensions. "Turned" means multiplied by Q_i along each dimension i, "turned
back" by the transposed Q_i:

    M <- beta1 * M + (1 - beta1) * G                         exp_avg
    V <- beta2 * V + (1 - beta2) * (G turned)^2              exp_avg_sq
    D <- (M turned) / (sqrt(V) + eps), turned back
    p <- p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * D
    p <- p - lr * weight_decay * p
    S_i <- beta3 * S_i + (1 - beta3) * G Gᵀ                  statistics
    Q_i <- orthogonal part (QR) of S_i Q_i                   roots, every `precondition_frequency`

The first step changes no parameter. It sets S_i to the statistics of its gradient, and Q_i to the
eigenvectors of S_i. In the second step, t is 1. Before each QR, the columns of Q_i are sorted by
their share of S_i, and V is reordered with them.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, arXiv 2409.11321. The same
as `SOAP` of pytorch-optimizer. A background thread computes the bases Q_i during training, see
`roots`. The bases of a step are first used in the next step, so a delay of 1 changes nothing.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.background import Compute, Roots, Snapshot
from graphstash.training.optimizers.factors import Factors, factors_of
from graphstash.training.optimizers.formula import Options, Split, can_be_squared, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in
from graphstash.training.optimizers.roots import RootsOptimizer

__all__ = ["SOAP"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    eps, blocking = options
    lr, weight_decay, _, _, rest1, rest2, log1, log2, *bases = old.scalars
    began = step > 1
    before = torch.clamp(step - 1, min=1)
    length = lr * (-torch.expm1(before * log2)).sqrt() / -torch.expm1(before * log1)
    results: list[tuple[Tensor, ...]] = []
    for parameter, gradient, mean, square, basis in zip(
        old.parameters, old.gradients, *old.slots, bases, strict=True
    ):
        factors = factors_of(parameter.shape, blocking)
        wide = gradient.to(basis.dtype)
        new_mean = mean.to(basis.dtype).lerp(wide, rest1)
        new_square = square.to(basis.dtype).lerp(factors.apply(basis, wide).square(), rest2)
        turned = factors.apply(basis, new_mean) / (new_square.sqrt() + eps)
        change = factors.apply(basis, turned, transposed=True)
        changed = (parameter - change * length) * (1 - lr * weight_decay)
        pairs = ((changed, parameter), (new_mean, mean), (new_square, square))
        counts = began & can_be_squared(wide)
        results.append(tuple(torch.where(counts, new, kept) for new, kept in pairs))
    parameters, means, squares = (list(each) for each in zip(*results, strict=True))
    return parameters, [means, squares]


def _basis(snapshot: Snapshot) -> Roots:
    """Return bases of eigenvectors at first, then the old bases after one power iteration."""
    factors = snapshot.factors
    (matrices,) = factors.matrices(snapshot.statistics)
    (old,) = factors.matrices(snapshot.roots)
    bases, orders = [], []
    for matrix, basis in zip(matrices, old, strict=True):
        if matrix is None or basis is None:
            continue
        if snapshot.is_first:
            bases.append(torch.linalg.eigh(matrix).eigenvectors.flip(1))  # largest first
            continue
        power = matrix @ basis
        order = torch.argsort((basis * power).sum(0), descending=True)
        bases.append(torch.linalg.qr(power[:, order]).Q)
        orders.append(order)
    flat = torch.cat([basis.flatten() for basis in bases])
    return Roots(flat, torch.cat(orders) if orders else None)


def _sorted(tensor: Tensor, factors: Factors, order: Tensor) -> Tensor:
    """Permute a turned tensor as `_basis` has permuted the columns of the old bases."""
    result = tensor.reshape(factors.shape)
    orders = torch.split(order, [factors.shape[dimension] for dimension in factors.dimensions])
    for dimension, positions in zip(factors.dimensions, orders, strict=True):
        result = result.index_select(dimension, positions)
    return result.reshape(tensor.shape)


class SOAP(RootsOptimizer):
    """Sync-free SOAP; the formula is in the module's docstring.

    Statistics and bases each store d1² + ... + dn² numbers per parameter, in float32 or wider.

    Args:
        params: parameters or groups of them, as for torch.optim; not on torch_xla, not sharded.
        lr: learning rate, >= 0; about that of AdamW.
        betas: decay of the running means of the gradient and of its square, in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: decoupled weight decay, >= 0.
        shampoo_beta: decay of the statistics, in [0, 1); None: betas[1].
        precondition_frequency: calls of `step` between two computations of bases, 1 or more.
        delay: calls until bases are used, 0 to precondition_frequency. 0 waits for them; 1 gives
            the same bits.
        deterministic: do not use bases before `delay` calls, so that equal runs give equal bits.
            Always true with a delay of 0 or 1, or with several processes.
        max_preconditioner_dim: larger dimensions are not turned.
        merge_dims: merge neighboring dimensions, such as those of a convolution's filters, up to a
            product of max_preconditioner_dim.
        precondition_1d: also turn vectors; otherwise they are updated as by Adam.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. There is no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or a parameter is sharded or on torch_xla.
    """

    _operation = TracedOp("soap", selecting(_formula))
    _moments = ("exp_avg", "exp_avg_sq")
    _accumulates_first = False
    _splits = False
    _own_option = "shampoo_beta"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        delay: int = 1,
        deterministic: bool = False,
        max_preconditioner_dim: int = 10_000,
        merge_dims: bool = False,
        precondition_1d: bool = False,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _check(self, group: Group) -> None:
        super()._check(group)
        beta = self._statistics_beta(group)
        if not 0 <= beta < 1:
            raise ValueError(f"shampoo_beta must be at least 0 and below 1 (got {beta})")

    def _statistics_beta(self, group: Group) -> float:
        given = group["shampoo_beta"]
        return float(group["betas"][1] if given is None else given)

    def _compute(self, group: Group) -> Compute:
        del group
        return _basis

    def _replace(self, state: dict[str, Any], factors: Factors, roots: Roots) -> None:
        super()._replace(state, factors, roots)
        if roots.order is not None:
            square = state["exp_avg_sq"]
            square.copy_(_sorted(square, factors, roots.order))
