"""Shampoo: gradients multiplied along each dimension by inverse roots of their second moments.

G is the gradient, with shape [d1, ..., dn], negated if `maximize`. For dimension i, G Gᵀ sums over
all other dimensions and has shape [di, di]:

    S_i <- beta2 * S_i + (1 - beta2) * G Gᵀ             statistics; S_i + G Gᵀ if beta2 is 1
    R_i <- (S_i + eps * I)^(-1 / 2n)                    roots, every `precondition_frequency` calls
    D   <- G multiplied along each dimension by R_i
    D   <- D * |G| / |D|                                if graft, over the whole tensor
    B   <- beta1 * B + D                                momentum_buffer
    p   <- p - lr * weight_decay * p
    p   <- p - lr * (beta1 * B + D  if nesterov, else B)

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018, arXiv 1802.09568.
Blocks, merging and grafting to the length of SGD's step follow Anil et al., "Scalable Second Order
Optimization for Deep Learning", 2020, arXiv 2002.09018. eps is added when a root is computed, as in
Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo
Optimizer", 2023, arXiv 2309.06497.

With precondition_frequency=1, delay=0 and betas=(0, 1), steps with grafting, merging and blocks
equal those of pytorch-optimizer's `ScalableShampoo` with `use_svd=True`. Steps without these three
equal those of its `Shampoo`. With a larger precondition_frequency, pytorch-optimizer's classes may
compute the roots in different steps than this class.

A background thread computes the roots; the module `roots` describes when they are used.
"""

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.background import Compute, Roots, Snapshot
from graphstash.training.optimizers.factors import factors_of
from graphstash.training.optimizers.formula import Options, Split, can_be_squared, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in
from graphstash.training.optimizers.roots import RootsOptimizer

__all__ = ["Shampoo"]


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    del step
    graft, nesterov, blocking = options
    lr, weight_decay, beta1, _, _, _, _, _, *roots = old.scalars
    parameters, buffers = [], []
    for parameter, gradient, buffer, root in zip(
        old.parameters, old.gradients, old.slots[0], roots, strict=True
    ):
        wide = gradient.to(root.dtype)
        direction = factors_of(parameter.shape, blocking).apply(root, wide)
        if graft:
            least = torch.finfo(root.dtype).tiny
            direction = direction * (wide.norm() / direction.norm().clamp(min=least))
        moved = buffer * beta1 + direction
        change = moved * beta1 + direction if nesterov else moved
        changed = parameter * (1 - lr * weight_decay) - change * lr
        fits = can_be_squared(wide)
        buffers.append(torch.where(fits, moved, buffer))
        parameters.append(torch.where(fits, changed, parameter))
    return parameters, [buffers]


def _inverse_roots(eps: float, snapshot: Snapshot) -> Roots:
    factors = snapshot.factors
    roots = []
    for matrices in factors.matrices(snapshot.statistics):
        for matrix in matrices:
            if matrix is not None:
                values, vectors = torch.linalg.eigh(matrix)
                # Rounding can make an eigenvalue of 0 negative.
                powers = (values.clamp(min=0) + eps).pow(-1 / (2 * len(factors.dimensions)))
                roots.append(((vectors * powers) @ vectors.T).flatten())
    return Roots(torch.cat(roots))


class Shampoo(RootsOptimizer):
    """Sync-free Shampoo; the formula is in the module's docstring.

    Statistics and roots each store d1² + ... + dn² numbers per block, in float32 or wider.

    Args:
        params: parameters or groups of them, as for torch.optim; not on torch_xla, not sharded.
        lr: learning rate, >= 0; with `graft`, use the learning rate of SGD with momentum.
        betas: decay of the momentum, in [0, 1), and of the statistics, in [0, 1]; 1 sums them.
        eps: added to the eigenvalues of the statistics, > 0.
        weight_decay: decoupled weight decay, >= 0.
        nesterov: use Nesterov's momentum, see the formula.
        graft: scale each tensor's step to the length of SGD's step.
        precondition_frequency: calls of `step` between two computations of roots, 1 or more.
        delay: calls from the start of a computation until its roots are used, from 0 (the call
            waits for them) to precondition_frequency.
        deterministic: do not use roots before `delay` calls, even if they are ready, so that equal
            runs give equal bits. Always true with a delay of 0 or 1, or with several processes.
        max_preconditioner_dim: split larger dimensions into blocks of this size.
        merge_dims: merge neighboring dimensions, such as those of a convolution's filters, up to a
            product of max_preconditioner_dim.
        precondition_1d: also precondition vectors.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. There is no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or a parameter is sharded or on torch_xla.
    """

    _operation = TracedOp("shampoo", selecting(_formula))
    _constants = ("graft", "nesterov")
    _moments = ("momentum_buffer",)
    _accumulates_first = True
    _splits = True
    _own_option = "graft"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        graft: bool = True,
        precondition_frequency: int = 10,
        delay: int = 1,
        deterministic: bool = False,
        max_preconditioner_dim: int = 1024,
        merge_dims: bool = False,
        precondition_1d: bool = False,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, options_in(locals()), **options)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not group["eps"] > 0:
            raise ValueError(f"eps must be above 0 (got {group['eps']})")

    def _check_betas(self, *betas: float) -> None:
        super()._check_betas(betas[0])
        if not 0 <= betas[1] <= 1:
            raise ValueError(f"betas[1] must be from 0 to 1 (got {betas[1]})")

    def _statistics_beta(self, group: Group) -> float:
        return float(group["betas"][1])

    def _compute(self, group: Group) -> Compute:
        return partial(_inverse_roots, group["eps"])
