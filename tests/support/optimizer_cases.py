"""Parameters, gradients, options and references for the tests of the optimizers.

Plain torch and torch_xla jobs share them. The loss is a sum of products, so a gradient is the other
factor. A difference therefore comes from the optimizer.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from graphstash.training import optimizers

NOT_IN_TORCH: Final = frozenset({"LAMB", "Lion", "ScheduleFreeAdamW"})
"""Optimizers whose state dictionaries torch does not read, and for which torch has no fused
kernel."""

SHAPES = ((3, 4), (5,), (), (1,))


def public() -> ModuleType:
    """Return pytorch_optimizer, without transformers, which it would import only for DeepSpeed."""
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment] # None: absent
    is_new = modules.setdefault("transformers", None) is None
    try:
        import pytorch_optimizer

        return pytorch_optimizer
    finally:
        if is_new:
            del modules["transformers"]


class ReferenceLAMB(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, one parameter after the other, with numbers on the host."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "maximize": False}
        super().__init__(params, defaults | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # takes no closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, -p.grad if group["maximize"] else p.grad, group)

    def _update(self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        beta1, beta2 = group["betas"]
        t = state["step"] = state.get("step", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
        m_hat = m / (1 - math.pow(beta1, t))
        v_hat = v / (1 - math.pow(beta2, t))
        r = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
        p_norm, r_norm = p.norm().item(), r.norm().item()
        ratio = p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1.0
        p -= group["lr"] * ratio * r


class ReferenceScheduleFree(torch.optim.Optimizer):
    """A public implementation for each parameter, with a step count per parameter."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self._of_each: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step(self) -> None:  # type: ignore[override] # takes no closure
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                if p not in self._of_each:
                    self._of_each[p] = public().ScheduleFreeAdamW([p], **options)
                if p.grad is not None:
                    self._of_each[p].step()


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any]

    def ours(self, parameters: Sequence[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        return getattr(optimizers, self.name)(self._groups(parameters), **self.options, **more)

    def reference(self, parameters: Sequence[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        """Return torch's optimizer with `foreach=False` by default, or a public implementation."""
        if self.name == "LAMB":
            return ReferenceLAMB(self._groups(parameters), **self.options)
        if self.name == "ScheduleFreeAdamW":
            return ReferenceScheduleFree(self._groups(parameters), **self.options)
        if self.name == "Lion":
            return public().Lion(self._groups(parameters), **{"foreach": False, **self.options})
        more = more or {"foreach": False}
        return getattr(torch.optim, self.name)(self._groups(parameters), **self.options, **more)

    def _groups(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:2]},
            {"params": parameters[2:], "lr": 0.03, "weight_decay": 0.2},
        ]

    def __str__(self) -> str:
        options = "-".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}-{options}"


_KERNELS: Final = frozenset({"SGD", "Adam", "AdamW"})
"""Optimizers for which torch has a fused kernel."""

CASES: Final = {
    str(case): case
    for case in (
        Case("SGD", {"lr": 0.1}),
        Case("SGD", {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
        Case("SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True, "maximize": True}),
        Case("SGD", {"lr": 0.1, "momentum": 0.5, "dampening": 0.1, "maximize": True}),
        Case("Adam", {"lr": 0.01, "betas": (0.0, 0.9)}),
        Case("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        Case("AdamW", {"lr": 0.01}),
        Case(
            "AdamW",
            {
                "lr": 0.01,
                "betas": (0.8, 0.99),
                "weight_decay": 0.1,
                "amsgrad": True,
                "maximize": True,
            },
        ),
        Case("LAMB", {"lr": 0.01}),
        Case("LAMB", {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.1, "maximize": True}),
        Case("Lion", {"lr": 0.01}),
        Case("Lion", {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.1, "maximize": True}),
        Case("Adafactor", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
        Case("Adafactor", {"lr": 0.1, "beta2_decay": -0.5, "eps": (0.3, 0.5), "d": 1.5}),
        Case(
            "ScheduleFreeAdamW",
            {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True},
        ),
        Case(
            "ScheduleFreeAdamW", {"lr": 0.05, "warmup_steps": 5, "r": 0.5, "weight_lr_power": 1.5}
        ),
    )
}
"""Cases by name. Their options select different code paths."""

ON_XLA: Final = {
    name: case
    for name, case in CASES.items()
    if case.options.keys() & {"nesterov", "amsgrad", "r"}
    or (case.name, "betas" in case.options) in {("LAMB", True), ("Lion", True)}
    or name in {"SGD-lr=0.1", "Adafactor-lr=0.1-weight_decay=0.1-maximize=True"}
}
"""Cases with different graphs on torch_xla. On the host, all cases are compared with the
formula."""

FORMS: Final = [
    (name, fused)
    for name, case in CASES.items()
    for fused in ((None, False) if case.name in _KERNELS else (None,))
]
"""Names of cases, each with torch's kernels if torch has one, and with the formula alone."""

_LR = (0.0, 1.0, 0.3, 0.0, 0.03, 1.0, 0.1, 0.2, 0.0, 0.5, 1.0, 0.7)

SCHEDULES = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: _LR[step % len(_LR)] / 0.1),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=12),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 9)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)]
    ),
}
"""Schedules of the learning rate; some also change momentum or betas."""


class _ByHand:
    """A schedule that changes every option that a graph might have taken for a constant."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step = 0

    def step(self) -> None:
        self._step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = _LR[self._step % len(_LR)]
            group["weight_decay"] = (0.0, 1.0, 0.3)[self._step % 3]
            if "betas" in group:
                group["betas"] = (0.5 + 0.01 * self._step, 0.9 + 0.001 * self._step)
            else:
                group["momentum"] = (1.0, 0.5, 0.7)[self._step % 3]


BY_HAND = {"by hand": _ByHand}


def train_scheduled(
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    parameters: Sequence[nn.Parameter],
    *,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train with a schedule; `after` is called after every step."""
    device = parameters[0].device
    for step in range(12):
        factors = [g.to(device) for g in gradients(step) if g is not None]
        optimizer.zero_grad()
        loss_of(parameters, factors).backward()
        optimizer.step()
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()
        del factors
        after()


def new_parameters(
    device: str | torch.device = "cpu", *, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Return parameters, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [nn.Parameter(value.to(dtype).to(device)) for value in values]


def shaped(
    shapes: Collection[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Return parameters of these shapes, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(each, generator=generator).to(dtype)) for each in shapes]


def give_gradients(
    parameters: Sequence[nn.Parameter], step: int, *, bad: float | None = None, scale: float = 1.0
) -> None:
    """Set the gradients of a step. `bad` replaces the first element of the first gradient."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = gradient.to(parameter.dtype)
    if bad is not None and parameters[0].grad is not None:
        parameters[0].grad.view(-1)[0] = bad


def make_steps(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> None:
    """Make steps with the gradients of `give_gradients`."""
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def train_beside(
    ours: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    theirs: Sequence[nn.Parameter],
    reference: torch.optim.Optimizer,
    *,
    steps: int = 20,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Make steps with both optimizers, and bad steps with ours only.

    `after` is called after every step.
    """
    for step in range(steps):
        bad = {0: math.inf, 5: math.nan, 11: -math.inf}.get(step)
        give_gradients(ours, step, bad=bad)
        optimizer.step(found_inf=torch.tensor(float(bad is not None)))  # type: ignore[call-overload] # not torch's
        if bad is None:
            give_gradients(theirs, step)
            reference.step()
        after(step)


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies without a graph."""
    return [each.detach().clone() for each in tensors]


def assert_close(
    ours: Iterable[torch.Tensor],
    theirs: Iterable[torch.Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 1e-6,
) -> None:
    """Require equal tensors up to rounding."""
    torch.testing.assert_close(list(ours), list(theirs), rtol=rtol, atol=atol)


def assert_equal(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> None:
    """Require the same bits."""
    assert_close(ours, theirs, atol=0)


def gradients(
    step: int,
    *,
    bad: float | None = None,
    missing: Collection[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor | None]:
    """Return the gradients of a step, on the host; None for parameters without a gradient.

    Args:
        bad: non-finite number for the first element of the last gradient.
        missing: numbers of the parameters without a gradient.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    values = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]
    given = [None if n in missing else value for n, value in enumerate(values)]
    if bad is not None:
        last = [value for value in given if value is not None][-1]
        last.view(-1)[0] = bad
    return given


def loss_of(parameters: Sequence[nn.Parameter], factors: Sequence[torch.Tensor | None]) -> Any:
    """Return a loss with the gradient `factors`."""
    return sum((p * g).sum() for p, g in zip(parameters, factors, strict=True) if g is not None)
