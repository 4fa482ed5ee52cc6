"""The sync-free optimizers, the loss scale and clipping on torch_xla, compared with plain torch.

Many checks share one process, because torch_xla takes long to import. A step is one graph, which
runs once and is never read from the device.
"""

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.amp
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from graphstash.training import device, optimizers
from graphstash.training.optimizers.gradients import LossScale, clip_grad_norm_, clip_grad_value_
from support.cases import xla
from support.cases.ranks import error_of
from support.optimizer_cases import (
    BY_HAND,
    NOT_IN_TORCH,
    ON_XLA,
    SCHEDULES,
    SHAPES,
    give_gradients,
    gradients,
    loss_of,
    new_parameters,
    shaped,
    train_scheduled,
)

STEPS = 12
BAD = {0: math.inf, 5: math.inf, 7: math.nan}
BY_NAME: dict[str, Any] = {
    name: getattr(optimizers, name)
    for name in ("SGD", "Adam", "AdamW", "LAMB", "Lion", "Adafactor", "ScheduleFreeAdamW")
}
XLA, HOST = torch_xla.device(), torch.device("cpu")


class Counter:
    """Record compilations, executions, device reads and uploads of each step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        torch_xla.sync(wait=True)  # finish the work of earlier checks
        self.skip()

    def skip(self) -> None:
        names = ("UncachedCompile", "ExecuteTime", "TransferFromDeviceTime", "TransferToDeviceTime")
        self._before = xla.counts(*names)

    def next(self, *_: object) -> None:
        before = self._before
        self.skip()
        self.steps.append([b - a for a, b in zip(before, self._before, strict=True)])

    def require_one_graph(self, *, compiles_at_most: int = 1) -> None:
        assert self.steps[0][0] <= compiles_at_most, self.steps
        assert all(step[0] == 0 for step in self.steps[1:]), self.steps
        assert all(step[1:3] == [1, 0] for step in self.steps), self.steps


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.detach().cpu().clone() for each in tensors]


def assert_close(ours: Any, theirs: Any, *, atol: float = 1e-6, rtol: float = 0.0) -> None:
    for one, other in zip(on_host(ours), on_host(theirs), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=rtol, atol=atol)


def assert_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(on_host(ours), on_host(theirs), strict=True):
        assert torch.equal(one, other)


def state_of(optimizer: Any) -> list[Tensor]:
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return [value for each in parameters for value in optimizer.state[each].values()]


def on(parameters: Sequence[nn.Parameter], values: Iterable[Tensor | None]) -> list[Any]:
    return [None if each is None else each.to(parameters[0].device) for each in values]


def sync(parameters: Sequence[nn.Parameter]) -> None:
    if parameters[0].device.type == "xla":
        torch_xla.sync()


def train(
    parameters: list[nn.Parameter],
    optimizer: Any,
    scale: Any,
    *,
    steps: Iterable[int] = range(STEPS),
    clip: Callable[[Any], object] | None = None,
    before: Callable[[int], object] | None = None,
    after: Callable[[int], object] | None = None,
) -> list[float]:
    """Train with a loss scale. On the host, return the scale after every step."""
    history = []
    for step in steps:
        factors = on(parameters, gradients(step, bad=BAD.get(step)))
        if before:
            before(step)
        optimizer.zero_grad()
        scale.scale(loss_of(parameters, factors)).backward()
        if clip:
            scale.unscale_(optimizer)
            clip(parameters)
        found_inf = scale.step(optimizer)
        scale.update()
        del factors, found_inf
        sync(parameters)
        if after:
            after(step)
        if parameters[0].device == HOST:
            history.append(scale.get_scale())
    return history


def plain_steps(
    parameters: list[nn.Parameter],
    optimizer: Any,
    steps: Iterable[int],
    *,
    dtype: torch.dtype = torch.float32,
    after: Callable[[], object] = lambda: None,
) -> None:
    for step in steps:
        factors = on(parameters, gradients(step, dtype=dtype))
        optimizer.zero_grad()
        loss_of(parameters, factors).backward()
        optimizer.step()
        del factors
        sync(parameters)
        after()


def torchs_scaler() -> Any:
    return GradScaler("cpu", init_scale=8.0, growth_interval=3)


def new_scale() -> LossScale:
    return LossScale(8.0, growth_interval=3).to(XLA)


def matrix(name: str) -> None:
    """Train twice, without and with counters: both equal torch, and a step is one graph."""
    case = ON_XLA[name]
    theirs = new_parameters()
    history = train(theirs, case.reference(theirs), torchs_scaler())
    torch_xla.sync(wait=True)
    parameters = new_parameters(XLA)
    optimizer, scale, counter = case.ours(parameters), new_scale(), Counter()
    train(parameters, optimizer, scale, after=counter.next)
    counter.require_one_graph()
    assert_close(parameters, theirs)
    again = new_parameters(XLA)
    optimizer, scale = case.ours(again), new_scale()
    scales, held = [], [*on_host(new_parameters())]

    def everything() -> list[Tensor]:
        return on_host([*again, *state_of(optimizer)])

    def before(step: int) -> None:
        if step in BAD and step:
            held[:] = everything()

    def after(step: int) -> None:
        scales.append(scale.get_scale())
        if step == 0:
            held.extend(torch.zeros_like(each) for each in everything()[len(SHAPES) :])
        if step in BAD:
            assert_equal(held, everything())

    compiles = xla.counts("UncachedCompile")
    train(again, optimizer, scale, before=before, after=after)
    assert xla.counts("UncachedCompile") == compiles
    assert_equal(again, parameters)
    assert scales == history
    assert {float(optimizer.state[each]["step"]) for each in again} == {STEPS - len(BAD)}


def every_schedule_on_one_graph() -> None:
    for name, options in (("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.1})):
        for number, make in enumerate((SCHEDULES | BY_HAND).values()):
            parameters, theirs = new_parameters(XLA), new_parameters()
            optimizer, counter = BY_NAME[name](parameters, **options), Counter()

            def after(counter: Counter = counter) -> None:
                torch_xla.sync()
                counter.next()

            train_scheduled(optimizer, make(optimizer), parameters, after=after)
            reference = getattr(torch.optim, name)(theirs, **options, foreach=False)
            train_scheduled(reference, make(reference), theirs)
            # The steps are as long as a parameter, or ten times longer.
            assert_close(parameters, theirs, atol=2e-6, rtol=2e-6)
            counter.require_one_graph(compiles_at_most=1 if number == 0 else 0)


def clipping_by_norm_and_by_value() -> None:
    clips: tuple[tuple[Any, Any], ...] = (
        (lambda p: clip_grad_norm_(p, 0.5), lambda p: clip_grad.clip_grad_norm_(p, 0.5)),
        (lambda p: clip_grad_value_(p, 0.3), lambda p: clip_grad.clip_grad_value_(p, 0.3)),
    )
    for ours, torchs in clips:
        parameters, theirs = new_parameters(XLA), new_parameters()
        optimizer, scale = optimizers.AdamW(parameters, lr=0.1), new_scale()
        counter = Counter()
        train(parameters, optimizer, scale, steps=range(5), clip=ours, after=counter.next)
        reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
        train(theirs, reference, torchs_scaler(), steps=range(5), clip=torchs)
        counter.require_one_graph()
        assert_close(parameters, theirs)
        assert_close([p.grad for p in parameters], [p.grad for p in theirs])
    norms = [clip_grad_norm_(parameters, 1.0).cpu(), clip_grad.clip_grad_norm_(theirs, 1.0)]
    torch.testing.assert_close(*norms)


def clipping_on_the_host_is_torchs() -> None:
    assert nn.utils.clip_grad_norm_ is not clip_grad.clip_grad_norm_, "torch_xla replaces it"
    for step in range(9):  # only some norms show how torch_xla's function rounds
        results: list[list[Any]] = []
        for clip in (clip_grad_norm_, clip_grad.clip_grad_norm_):
            parameters = new_parameters()[:1]
            give_gradients(parameters, step)
            results.append([clip(parameters, 0.1), *(p.grad for p in parameters)])
        assert_equal(*results)


def state_is_written_over_in_place() -> None:
    module: Any = device
    default, module.donates = module.donates, lambda: True

    def aliased() -> int:
        data = xla_metrics.metric_data("InputOutputAliasCount")
        return int(data[1]) if data else 0

    try:
        for name, make in BY_NAME.items():
            options: Any = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
            parameters = [nn.Parameter(torch.randn(n, 11).to(XLA)) for n in (7, 9)]
            optimizer, scale = make(parameters, lr=0.1, **options), new_scale()
            before, live = aliased(), []
            for _ in range(4):
                optimizer.zero_grad()
                loss: Any = sum((p * p).sum() for p in parameters)
                scale.scale(loss).backward()
                scale.step(optimizer)
                scale.update()
                torch_xla.sync(wait=True)
                created, destroyed = xla.counts("CreateXlaTensor", "DestroyXlaTensor")
                live.append(created - destroyed)
            changed = len({id(t) for t in (*parameters, *state_of(optimizer))}) + 2
            assert aliased() - before == changed, name
            assert len(set(live)) == 1, name  # no tensor stays alive
    finally:
        module.donates = default


def aliases_of_parameters_follow() -> None:
    """Require that aliases from detach() and state_dict() show a later step."""
    parameter = nn.Parameter(torch.ones(3).to(XLA))
    optimizer = optimizers.SGD([parameter], lr=1.0)
    state = nn.ParameterList([parameter]).state_dict()["0"]
    others = [parameter.detach(), parameter.data, state]
    parameter.data.mul_(2)  # through an alias
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    torch_xla.sync()
    assert_equal([parameter, *others], [torch.full((3,), 1.5)] * 4)


def torch_goes_on_from_ours_and_ours_from_torch() -> None:
    for case in ON_XLA.values():
        if case.name in NOT_IN_TORCH:
            continue
        first = new_parameters()
        theirs = case.reference(first)
        plain_steps(first, theirs, range(4))
        here = [nn.Parameter(each.detach().to(XLA)) for each in first]
        ours = case.ours(here)
        ours.load_state_dict(theirs.state_dict())
        torch_xla.sync()
        counter = Counter()
        plain_steps(here, ours, range(4, 8), after=counter.next)
        counter.require_one_graph()
        last = [nn.Parameter(each.detach().cpu()) for each in here]
        theirs = case.reference(last)
        theirs.load_state_dict(ours.state_dict())
        plain_steps(last, theirs, range(8, 12))
        alone = new_parameters()
        plain_steps(alone, case.reference(alone), range(12))
        assert_close(last, alone)


def the_scalers_of_torch_and_torch_xla() -> None:
    theirs = new_parameters()
    reference = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    history = train(theirs, reference, torchs_scaler(), steps=range(8))
    for scaler in (
        GradScaler("xla", init_scale=8.0, growth_interval=3),
        torch_xla.amp.GradScaler(init_scale=8.0, growth_interval=3),
    ):
        parameters, counter = new_parameters(XLA), Counter()
        optimizer = optimizers.AdamW(parameters, lr=0.1)
        train(parameters, optimizer, scaler, steps=range(8), after=counter.next)
        assert_close(parameters, theirs)
        assert scaler.get_scale() == history[-1]
        del counter.steps[0]  # the first step creates their scale and therefore has another graph
        counter.require_one_graph()


def other_types_are_kept() -> None:
    for name, make in BY_NAME.items():
        for dtype, atol, rtol in ((torch.bfloat16, 0.05, 0.02), (torch.float64, 1e-9, 0.0)):
            if dtype == torch.float64 and name not in {"SGD", "AdamW", "Adafactor"}:
                continue
            parameters = new_parameters(XLA, dtype=dtype)
            optimizer, counter = make(parameters, lr=0.1), Counter()
            plain_steps(parameters, optimizer, range(3), dtype=dtype, after=counter.next)
            counter.require_one_graph()
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            theirs = new_parameters(dtype=wide)
            plain_steps(theirs, make(theirs, lr=0.1), range(3), dtype=wide)
            assert_close(parameters, theirs, atol=atol, rtol=rtol)
            kept = {each.dtype for each in (*parameters, *state_of(optimizer))}
            assert kept == {dtype, torch.float32}, name  # the step is a float32
    mixed = [
        nn.Parameter(torch.ones(shape, dtype=dtype).to(XLA))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for shape in ((), (2,))
    ]
    optimizer, scale = optimizers.AdamW(mixed, lr=0.1), new_scale()
    for _ in range(3):
        optimizer.zero_grad()
        loss: Any = sum(each.sum().float() for each in mixed)
        scale.scale(loss).backward()
        clip_grad_norm_(mixed, 1.0)
        scale.step(optimizer)
        scale.update()
        torch_xla.sync()
    assert_close(mixed, [torch.full_like(each, 0.7) for each in on_host(mixed)], atol=0.02)


def here_and_on_the_host(
    make: Callable[[Any], Any], shapes: Any, *, steps: int
) -> tuple[list[list[nn.Parameter]], list[Any]]:
    """Train in one graph and on the host, with bad steps; return parameters and optimizers."""
    trained, made = [], []
    for place in (XLA, HOST):
        values = shaped(shapes)
        parameters = [nn.Parameter(each.detach().to(place)) for each in values]
        optimizer, counter = make(parameters), Counter()
        for step in range(steps):
            give_gradients(values, step)
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value.grad.to(place) if value.grad is not None else None
            bad = torch.tensor(1.0 if step in BAD else 0.0)
            optimizer.step(found_inf=device.upload([bad], place)[0])
            optimizer.zero_grad()
            torch_xla.sync()
            counter.next()
        if place == XLA:
            counter.require_one_graph()
        trained.append(parameters)
        made.append(optimizer)
    return trained, made


def muon_rounds_as_bfloat16_does() -> None:
    shapes = ((6, 4), (4, 6), (3, 2, 2, 2))
    trained, _ = here_and_on_the_host(lambda p: optimizers.Muon(p, lr=0.02), shapes, steps=4)
    assert_close(*trained, atol=4 * 0.02 * 0.05)


def moments_of_eight_bits_are_rounded_as_on_the_host() -> None:
    shapes = ((64, 64), (5,))
    trained, made = here_and_on_the_host(
        lambda p: optimizers.AdamW8bit(p, lr=0.01), shapes, steps=8
    )
    # If two sums differ in their last bit, a moment may be rounded to the other side.
    assert_close(*trained, atol=0.01 / 4)
    ours, theirs = ([t for t in state_of(o) if t.dtype == torch.uint8] for o in made)
    assert len(ours) == 2
    for one, other in zip(on_host(ours), theirs, strict=True):
        assert int((one != other).sum()) <= one.numel() / 1000


def trained_with_switches(place: torch.device) -> tuple[list[Tensor], list[int]]:
    """Return parameters and all averages, and the compilations of each step."""
    parameters = new_parameters(place)
    optimizer = optimizers.ScheduleFreeAdamW(parameters, lr=0.05)
    averages: list[Tensor] = []
    compiles: list[int] = []
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)  # as if the model had loaded other values after the state was made
    torch_xla.sync(wait=True)

    def after(step: int) -> None:
        if step % 4 == 3:
            optimizer.eval()
            averages.extend(on_host(parameters))
            optimizer.train()
            torch_xla.sync(wait=True)
        compiles.extend(xla.counts("UncachedCompile"))

    train(parameters, optimizer, new_scale() if place == XLA else torchs_scaler(), after=after)
    return [*parameters, *averages], compiles


def averages_are_put_in_and_taken_out() -> None:
    """Require that a switch between two steps changes neither the steps nor their graph."""
    here, compiles = trained_with_switches(XLA)
    there, _ = trained_with_switches(HOST)
    assert_close(here, there)
    # The first switch compiles its own graph. The steps after it run the earlier graph.
    assert compiles[3] == compiles[-1]


def optimizers_that_compute_beside_the_steps_are_refused() -> None:
    for name in ("Shampoo", "SOAP"):
        message = error_of(partial(getattr(optimizers, name), new_parameters(XLA)))
        start = f"ValueError: {name} decomposes matrices beside the training, and torch_xla"
        assert message.startswith(start), message
        assert message.endswith("use Muon, LAMB or AdamW"), message


def checks(*, names: list[str]) -> dict[str, str]:
    """Run functions of this module or cases of `matrix`; return their tracebacks, or ""."""
    gc.disable()  # live tensors decide the contents of a lazy step
    warnings.simplefilter("ignore", UserWarning)  # a SequentialLR warns of its own code
    errors = {}
    for name in names:
        try:
            if name in ON_XLA:
                matrix(name)
            else:
                globals()[name]()
        except Exception:
            errors[name] = traceback.format_exc()
        else:
            errors[name] = ""
        gc.collect()
    return errors
