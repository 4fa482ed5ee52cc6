"""Schedule-Free AdamW: an average of the iterates replaces a falling learning rate.

g is the gradient (negated to maximize) at y, the value of the parameters in training. t is the
number of the step, from 1:

    a <- lr * min(1, t / warmup_steps)
    v <- beta2 * v + (1 - beta2) * g^2                                   exp_avg_sq
    u <- g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y
    w <- t^r * (largest a until now)^weight_lr_power
    c <- w / (sum of w until now)
    y <- y + c * (z - y) + a * (beta1 * (1 - c) - 1) * u
    z <- z - a * u                                                       z; y before the first step

The result of the training is x, the average of all z with the weights w. The model is evaluated at
x, which follows from y = beta1 * x + (1 - beta1) * z:

    eval()     saves y and writes x to the parameters
    train()    restores y bit for bit, so an evaluation does not change the training

Defazio et al., "The Road Less Scheduled", 2024, arXiv 2405.15682. Each parameter counts the steps
in which it had a gradient; in the authors' implementation, a group counts all steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Unpack

import torch
from torch import Tensor

from graphstash.training.device import TracedOp, assign, materialize
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.cohort import MASTER
from graphstash.training.optimizers.formula import Options, Split, decayed, selecting
from graphstash.training.optimizers.options import Group, TorchOptions, options_in

__all__ = ["ScheduleFreeAdamW"]

_SAVED: Final = "y"
"""State tensor that a parameter has only while it holds x."""
_SWITCHED: Final = "averages"
"""Key in a saved group: how many of its parameters hold x. In a live group it is a placeholder."""


def _formula(old: Split, step: Tensor, options: Options) -> tuple[list[Tensor], list[list[Tensor]]]:
    eps, warmup_steps, r, weight_lr_power = options
    lr, weight_decay, beta1, beta2, _, rest2, _, log2 = old.scalars
    step = step.to(lr.dtype)
    if warmup_steps:
        lr = lr * (step / warmup_steps).clamp(max=1.0)
    # On torch_xla, parameters may change after state was created: z begins at y in the first step.
    points = [
        torch.where(step == 1, y, z) for y, z in zip(old.parameters, old.slots[0], strict=True)
    ]
    squares = torch._foreach_add(
        torch._foreach_mul(old.slots[1], beta2),
        torch._foreach_mul(torch._foreach_mul(old.gradients, old.gradients), rest2),
    )
    correction = -torch.expm1(step * log2)
    denominator = torch._foreach_add(
        torch._foreach_sqrt(torch._foreach_div(squares, correction)), eps
    )
    update = decayed(torch._foreach_div(old.gradients, denominator), old.parameters, weight_decay)
    # Store the sum in units of the newest weight, so that equal weights add up without rounding.
    before = torch.stack(old.slots[3])
    largest = torch.maximum(before, lr)
    counts = (largest > 0) | (weight_lr_power == 0)
    older = torch.where(largest > 0, before / largest, 0.0).pow(weight_lr_power)
    total = torch.stack(old.slots[2]) * older * ((step - 1) / step).pow(r) + counts
    share = torch.where(total > 0, total.reciprocal(), 0.0)  # [parameters], like those above
    # If z and y are both infinite, their difference would be NaN.
    distances = [
        torch.where(z == y, 0.0, z - y) for z, y in zip(points, old.parameters, strict=True)
    ]
    pulls = torch._foreach_mul(distances, list(share))
    pushes = torch._foreach_mul(update, list(lr * (beta1 * (1 - share) - 1)))
    parameters = torch._foreach_add(torch._foreach_add(old.parameters, pulls), pushes)
    points = list(torch._foreach_sub(points, torch._foreach_mul(update, lr)))
    return list(parameters), [points, list(squares), list(total), list(largest)]


class ScheduleFreeAdamW(SyncFreeOptimizer):
    """Sync-free Schedule-Free AdamW; the formula is in the module's docstring.

    Call `eval()` together with the model's, before an evaluation and before you save the model for
    use. Call `train()` before the next step. `graphstash.training.train` does both around
    evaluations. A model and its optimizer that are saved together resume exactly, in either mode.
    With torch.distributed.checkpoint, save in `train()`: in `eval()`, each parameter has one more
    state tensor, which a new optimizer lacks and which is therefore not loaded.

    A model with batch norm needs statistics for x: before an evaluation, run some batches with the
    optimizer in `eval()` and the model in `train()`.

    Args:
        params: parameters or groups of them, as for torch.optim.
        lr: learning rate, >= 0, about 1 to 10 times AdamW's; keep it constant.
        betas: weight of x in y, in (0, 1), and decay of the running mean of the gradient's square,
            in [0, 1).
        eps: added to the denominator, >= 0; part of the graph.
        weight_decay: factor of y in u, >= 0.
        warmup_steps: steps in which the learning rate rises from 0, >= 0; part of the graph.
        r: exponent of the step in the weights of the average, >= 0; part of the graph.
        weight_lr_power: exponent of the learning rate in these weights, >= 0; part of the graph.
        maximize: maximize the loss instead of minimizing it.
        options: see `TorchOptions`. There is no fused kernel.

    Raises:
        ValueError: an argument is out of its range, or a parameter is sharded.
    """

    _operation = TracedOp("schedule_free", selecting(_formula))
    _has_own_types = True
    _nonnegative = ("lr", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power")
    _constants = ("eps", "warmup_steps", "r", "weight_lr_power")
    _moments = ("z", "exp_avg_sq", "weight_sum", "lr_max")
    _refuses_shards = (
        "switches between averages and iterates, which would not reach the copies that FSDP "
        "gathers, and a parameter is sharded: use AdamW"
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        maximize: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(params, {**options_in(locals()), _SWITCHED: 0}, **options)

    @torch.no_grad()
    def eval(self) -> None:
        """Write the averages to the parameters, to evaluate or use them; may be repeated."""
        for hook in list(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)  # `fuse` registers one: it makes pending updates, or raises
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if "z" in state and _SAVED not in state:
                    average = _average(parameter, state, group["betas"][0])
                    state[_SAVED] = parameter.detach().clone()
                    assign([parameter], [average])
        self._settle()

    @torch.no_grad()
    def train(self) -> None:
        """Restore the values that `eval` saved, bit for bit; may be repeated."""
        switched = {p: state for p, state in self.state.items() if _SAVED in state}
        for parameter, state in switched.items():
            assign([parameter], [state[_SAVED]])
        self._settle()
        for state in switched.values():  # last, so that train() can be repeated after an interrupt
            del state[_SAVED]

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> Any:
        """Make a step as in the other optimizers.

        Raises:
            RuntimeError: the parameters are the averages; and errors of the other optimizers.
            ValueError: OneCycleLR or CyclicLR cycles `betas`.
        """
        if any("max_momentum" in group for group in self.param_groups):
            raise ValueError(
                "a schedule changes betas[0] in each step, but the averages follow from y and z "
                "only while it stays: leave lr constant, or give the schedule cycle_momentum=False"
            )
        if any(_SAVED in state for state in self.state.values()):
            raise RuntimeError(
                "the parameters are averages for evaluation: call train() of the optimizer before "
                "gradients are computed and step() is called"
            )
        return super().step(closure, found_inf, grad_scale)

    def _settle(self) -> None:
        """Materialize switched tensors, to keep the switch out of the next graph on torch_xla."""
        switched = [(p, state[_SAVED]) for p, state in self.state.items() if _SAVED in state]
        # `materialize` clones scalars, which would reorder the next graph's results.
        materialize([tensor for pair in switched for tensor in pair if tensor.dim()])

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not group["betas"][0] > 0:
            raise ValueError(f"betas[0] must be above 0 (got {group['betas'][0]})")

    def _check_loaded(self, group: Group, saved: Group, states: Sequence[Group]) -> None:
        if not {"weight_lr_power", "master_weights"} <= saved.keys():
            raise ValueError(
                "the state dictionary is not of graphstash's ScheduleFreeAdamW, whose state has "
                "another meaning than that of others: load only the model, and begin with new state"
            )
        super()._check_loaded(group, saved, states)
        if (there := sum(_SAVED in state for state in states)) != saved.get(_SWITCHED, there):
            raise ValueError(
                f"the state was saved in eval(), and has only {there} of the {saved[_SWITCHED]} "
                "tensors that eval() had put aside: torch.distributed.checkpoint leaves out what "
                "the new optimizer does not have, too. Call get_optimizer_state_dict and then "
                "eval() of the new optimizer, and load into what get_optimizer_state_dict and "
                "get_model_state_dict give then"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict whose groups also contain the number of parameters that hold x."""
        state_dict = super().state_dict()
        groups = [
            group
            | {_SWITCHED: sum(_SAVED in state_dict["state"].get(n, {}) for n in group["params"])}
            for group in state_dict["param_groups"]
        ]
        return state_dict | {"param_groups": groups}

    def _shapes_of(self, group: Group, like: Tensor) -> dict[str, torch.Size]:
        return super()._shapes_of(group, like) | {_SAVED: like.shape}

    def _beginning(self, group: Group, parameter: Tensor, name: str) -> Tensor:
        if name in {"z", "exp_avg_sq"}:
            return super()._beginning(group, parameter, name)
        return parameter.new_zeros((), dtype=torch.promote_types(parameter.dtype, torch.float32))


def _average(parameter: Tensor, state: Mapping[str, Tensor], beta1: float) -> Tensor:
    """Return x in the parameter's type; before the first step, the parameter's value."""
    y = state.get(MASTER, parameter)
    z = state["z"]
    moves = (state["step"] > 0) & (z != y)  # if both are infinite, x is infinite
    average = torch.where(moves, y.lerp(z, 1 - 1 / beta1), y)
    return average.to(parameter.dtype)
