"""Muon: steps of a matrix whose singular values are all about one; AdamW for everything else.

G is the gradient of a matrix (negated to maximize) of A rows and B columns:

    M <- momentum * M + (1 - momentum) * G                     momentum_buffer
    U <- momentum * M + (1 - momentum) * G  if nesterov, else M
    X <- U / |U|, then five times           X <- a X + (b (X X^T) + c (X X^T)^2) X
    W <- W - lr * weight_decay * W
    W <- W - lr * ratio * X                 ratio is sqrt(max(1, A / B)), or 0.2 * sqrt(max(A, B))

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). The second ratio, by Liu et al., "Muon is Scalable for LLM
Training", 2025, arXiv 2502.16982, lets matrices use AdamW's learning rates. The iteration runs in
bfloat16, as in `torch.optim.Muon` of torch 2.9, whose state dicts can be loaded. Tensors with more
dimensions, such as a convolution's weight, are flattened to matrices from the second dimension on.

Muon's authors update embeddings, the last layer, and parameters that are not matrices with AdamW.
`muon_groups` makes such groups.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, Unpack

import torch
from torch import Tensor, nn

from graphstash.training.device import TracedOp
from graphstash.training.optimizers.adam import adam_formula, fused_adam
from graphstash.training.optimizers.base import Kernel, SyncFreeOptimizer
from graphstash.training.optimizers.cohort import Cohort
from graphstash.training.optimizers.formula import Options, Split, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in, require_count
from graphstash.training.sharding import is_sharded

__all__ = ["Muon", "muon_groups"]

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_MIN_NORM: Final = 1e-7
_CYCLED: Final = "max_momentum"
"""Key that OneCycleLR and CyclicLR add to a group if they cycle the momentum."""
_RATIOS: Final[Mapping[str, Callable[[int, int], float]]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / max(1, columns))),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    is_matrix, *rest = options
    return (_muon if is_matrix else adam_formula)(old, step, tuple(rest))


def _muon(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    del step
    nesterov, adjustment, coefficients, iterations = options
    lr, weight_decay, momentum, complement = old.scalars
    buffers, parameters, gradients = old.slots[0], old.parameters, old.gradients
    kept = 1 - lr * weight_decay
    weight, weight_of_mean = ([each.to(buffers[0].dtype)] for each in (complement, momentum))
    if old.may_overwrite:
        torch._foreach_lerp_(buffers, gradients, weight * len(buffers))
        torch._foreach_mul_(parameters, kept)
    else:
        buffers = list(torch._foreach_lerp(buffers, gradients, weight * len(buffers)))
        parameters = list(torch._foreach_mul(parameters, kept))
    updates = buffers
    if nesterov:
        updates = list(torch._foreach_lerp(gradients, buffers, weight_of_mean * len(buffers)))
    matrices = [update.flatten(1) for update in updates]
    for numbers in _group_alike(matrices, (coefficients, iterations)):
        ratio = _RATIOS[adjustment](*matrices[numbers[0]].shape)
        chosen = [matrices[number] for number in numbers]
        if len(numbers) == 1:
            batch = _orthogonalize(chosen[0], coefficients, iterations)[None]
        else:
            batch = _orthogonalize_batch(chosen, coefficients, iterations)
        changes = batch.to(parameters[numbers[0]].dtype) * (lr * ratio)
        for number, change in zip(numbers, changes.unbind(), strict=True):
            parameter = parameters[number]
            shaped = change.reshape(parameter.shape)
            parameters[number] = parameter.sub_(shaped) if old.may_overwrite else parameter - shaped
    return parameters, [buffers]


_TESTED_ELEMENTS: Final = 2**14
"""Elements of the self-test of a batch, because few elements of small matrices would differ."""

_Iteration = tuple[tuple[float, float, float], int]
"""Coefficients, and the number of iterations."""


def _group_alike(matrices: Sequence[Tensor], iteration: _Iteration) -> list[list[int]]:
    """Return the numbers of the matrices that may be computed in a batch together."""
    alone = [[number] for number in range(len(matrices))]
    first = matrices[0]
    has_values = first.device.type == "cpu" and not torch.compiler.is_compiling()
    if len(matrices) == 1 or not has_values:
        return alone
    by_shape: dict[torch.Size, list[int]] = {}
    numbers: list[list[int]] = []
    for number, matrix in enumerate(matrices):
        if matrix.is_contiguous() and matrix.numel() > 0:
            by_shape.setdefault(matrix.shape, []).append(number)
        else:  # kernels depend on the layout, and a batch has another one
            numbers.append([number])
    for shape, same in by_shape.items():
        kernels = (torch.get_num_threads(), torch.backends.mkldnn.enabled)
        exact = len(same) == 1 or _is_batch_exact(len(same), shape, first.dtype, iteration, kernels)
        numbers += [same] if exact else [[number] for number in same]
    return numbers


@lru_cache(maxsize=1024)
def _is_batch_exact(
    count: int,
    shape: torch.Size,
    dtype: torch.dtype,
    iteration: _Iteration,
    kernels: tuple[int, bool],
) -> bool:
    """Return whether this machine computes each matrix of a batch as it computes it alone.

    The bits of a product depend on the kernel. torch chooses it by shape, dtype and `kernels`: the
    number of threads, and whether oneDNN may be used.
    """
    del kernels
    if not _adds_alike(count, shape):
        return False
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(count), device="cpu")
    for _ in range(max(1, _TESTED_ELEMENTS // (count * shape.numel()))):
        matrices = [random(shape).to(dtype) for _ in range(count)]
        batch = _orthogonalize_batch(matrices, *iteration)
        alone = [_orthogonalize(matrix, *iteration) for matrix in matrices]
        if not all(map(torch.equal, batch.unbind(), alone)):
            return False
    return True


def _adds_alike(count: int, shape: torch.Size) -> bool:
    """Return whether the products of a batch add in the same order as products alone.

    Rounding to bfloat16 hides another order for most values. So half of these sums are 0 except for
    their rounding, which shows the order.
    """
    generator = torch.Generator("cpu").manual_seed(count)

    def factors(rows: int, columns: int) -> Tensor:
        half = torch.randn(count, rows, columns // 2, generator=generator, device="cpu")
        half *= 2.0 ** (12 + torch.arange(columns // 2, device="cpu") * 7 % 24)
        sign = 1 - 2 * torch.arange(rows, device="cpu").remainder(2)[:, None]
        odd = half.new_ones(count, rows, columns % 2)
        return torch.cat([half, odd, half * sign], 2).to(torch.bfloat16)

    rows, columns = min(shape), max(shape)
    gram, x, y = factors(rows, rows), factors(rows, columns), factors(columns, rows)
    if shape[0] > shape[1]:
        x = x.mT.contiguous().mT
    else:
        y = y.mT.contiguous().mT
    products = [(x, x.mT), (gram, gram.mT.contiguous()), (gram, y.mT)]
    for left, right in products:
        zeros = left.new_zeros(count, left.shape[1], right.shape[2])
        batches = torch.bmm(left, right), torch.baddbmm(zeros, left, right)
        for number, (a, b, zero) in enumerate(zip(left, right, zeros, strict=True)):
            alone = a @ b, torch.addmm(zero, a, b)
            if not all(map(torch.equal, [batch[number] for batch in batches], alone)):
                return False
    return True


def _orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], iterations: int
) -> Tensor:
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x  # makes X X^T the smaller of the two products
    x = x / x.norm().clamp(min=_MIN_NORM)
    for _ in range(iterations):
        gram = x @ x.T
        x = _sum(a, x, 1.0, _sum(b, gram, c, gram, gram), x)
    return x.T if is_tall else x


def _orthogonalize_batch(
    matrices: Sequence[Tensor], coefficients: tuple[float, float, float], iterations: int
) -> Tensor:
    """Return what `_orthogonalize` returns for matrices of one shape, stacked."""
    a, b, c = coefficients
    x = torch.stack(list(matrices)).to(torch.bfloat16)
    is_tall = x.shape[1] > x.shape[2]
    norms = torch._foreach_norm(list(x.unbind()))
    torch._foreach_div_(list(x.unbind()), torch._foreach_maximum(norms, _MIN_NORM))
    x = x.mT if is_tall else x
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _sum(beta: float, addend: Tensor, alpha: float, left: Tensor, right: Tensor) -> Tensor:
    """Return beta * addend + alpha * (left @ right) for matrices in bfloat16.

    torch_xla would compute addmm with factors on the host, and fail while tracing.
    """
    if left.device.type == "xla":
        return beta * addend + alpha * (left @ right)
    return torch.addmm(addend, left, right, beta=beta, alpha=alpha)


class Muon(SyncFreeOptimizer):
    """Sync-free Muon; the formula is in the module's docstring.

    Groups with `use_muon=True`, the default, contain matrices. `AdamW` updates the other groups.
    `muon_groups` makes both groups from a model. Scaling the gradients changes a matrix's step only
    by rounding.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0. With adjust_lr_fn="original", matrices usually need about 0.02,
            and AdamW's groups another value.
        weight_decay: decoupled weight decay, >= 0.
        momentum: decay of the running mean of the gradient, in [0, 1). OneCycleLR and CyclicLR
            cycle it; in AdamW's groups, they cycle the first of `betas`.
        nesterov: step in the direction of the mean after one more step with the same gradient.
        adjust_lr_fn: "match_rms_adamw" makes steps as long as AdamW's, so that one learning rate
            fits both kinds of groups. None means "original", as in torch.
        ns_coefficients: a, b and c of the iteration. A change compiles a new graph.
        ns_steps: number of iterations, 1 to 99. A change compiles a new graph.
        betas, eps: options of AdamW's groups.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. Matrices have no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or a parameter of a group with use_muon=True
            has fewer than two dimensions or is sharded.
    """

    _operation = TracedOp("muon", selecting(_formula))
    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, {**options_in(locals()), "use_muon": True}, **options)

    def _check_parameters(self, group: Group) -> None:
        super()._check_parameters(group)
        flat = [list(each.shape) for each in group["params"] if each.dim() < 2]
        if not group["use_muon"]:
            return
        if any(map(is_sharded, group["params"])):
            raise ValueError(
                "Muon needs whole matrices, and a parameter is sharded: put it into a group with "
                "use_muon=False"
            )
        if flat:
            raise ValueError(
                f"Muon updates matrices, and a parameter has the shape {flat[0]}: put it into a "
                "group with use_muon=False, as muon_groups does"
            )

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be at least 0 and below 1 (got {group['momentum']})")
        if not isinstance(group["ns_steps"], int) or not 1 <= group["ns_steps"] < 100:
            raise ValueError(
                f"ns_steps must be a whole number from 1 to 99 (got {group['ns_steps']})"
            )
        require_count(group, 3, "ns_coefficients")
        if group["adjust_lr_fn"] not in (None, *_RATIOS):
            raise ValueError(
                f"adjust_lr_fn must be None, {' or '.join(_RATIOS)} (got {group['adjust_lr_fn']})"
            )

    def _check_loaded(self, group: Group, saved: Group, states: Sequence[Group]) -> None:
        given = saved.get("use_muon", group["use_muon"])
        if given is not group["use_muon"]:
            raise ValueError(
                f"the state dictionary has a group with use_muon={given} where this optimizer has "
                f"one with {group['use_muon']}: give it the groups in the order in which they were "
                "saved"
            )
        super()._check_loaded(group, saved, states)

    def _scheduled(self, group: Group) -> dict[str, float | Tensor]:
        if not group["use_muon"]:
            return super()._scheduled(group)
        momentum = _momentum(group)
        return {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "momentum": momentum,
            "1 - momentum": 1 - momentum,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict with the momentum that a schedule has set in each group."""
        state_dict = super().state_dict()
        groups = [group | {"momentum": _momentum(group)} for group in state_dict["param_groups"]]
        return state_dict | {"param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, also one that torch.optim.Muon saved during a schedule."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if _CYCLED in saved and "betas" not in saved:
                group["betas"] = (saved["momentum"], *group["betas"][1:])

    def _options(self, group: Group) -> Options:
        if not group["use_muon"]:
            return (False, group["eps"], False, True)
        return (
            *(True, group["nesterov"], group["adjust_lr_fn"] or "original"),
            *(tuple(group["ns_coefficients"]), group["ns_steps"]),
        )

    def _slots(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else super()._slots(group)

    def _uses_step(self, group: Group) -> bool:
        return not group["use_muon"]  # torch's Muon saves no step

    def _fused_kernel(self, group: Group, cohort: Cohort) -> Kernel | None:
        return None if group["use_muon"] else fused_adam(group, cohort, decoupled=True)


def _momentum(group: Group) -> float:
    """Return the momentum of a group.

    OneCycleLR and CyclicLR write it into the first of `betas`, because this optimizer has betas. In
    a group of matrices, no other code writes there.
    """
    is_cycled = group["use_muon"] and _CYCLED in group
    return float(group["betas"][0] if is_cycled else group["momentum"])


def muon_groups(
    model: nn.Module, *, adamw: Iterable[nn.Module], **adamw_options: Any
) -> list[dict[str, Any]]:
    """Split the parameters of a model into two groups for `Muon`: hidden matrices, and the rest.

    The rest, which AdamW updates: embeddings, the modules in `adamw`, parameters with fewer than
    two dimensions, and matrices tied to one of these. Both groups omit frozen parameters.

    Args:
        model: the model; each parameter is listed once, in the model's order.
        adamw: modules that AdamW updates, above all the last layer.
        adamw_options: options of AdamW's group, such as `lr` and `weight_decay`.

    Raises:
        ValueError: a module of `adamw` is not part of the model.
    """
    adamw = list(adamw)
    modules = set(model.modules())
    if unknown := [type(each).__name__ for each in adamw if each not in modules]:
        raise ValueError(f"adamw must name modules of the model (got another {unknown[0]})")
    others = {
        parameter
        for part in (*adamw, *(m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)))
        for parameter in part.parameters()
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    is_matrix = {each: each.dim() >= 2 and each not in others for each in trained}
    return [
        {"params": [each for each in trained if is_matrix[each]], "use_muon": True},
        {
            "params": [each for each in trained if not is_matrix[each]],
            "use_muon": False,
            **adamw_options,
        },
    ]
