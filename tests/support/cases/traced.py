"""Traced steps on torch_xla in many scenarios, each compared with the same lazy training.

Many scenarios share one process, because importing torch_xla takes longer than they do. A
difference is the largest one of all losses, parameters, buffers and gradients, relative to their
size.
"""

import gc
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor, nn
from torch.nn import functional

from graphstash.training.fusion import fuse
from graphstash.training.optimizers import AdamW
from graphstash.training.traced import traced_step, xla
from support.cases.ranks import error_of
from support.cases.xla import counts

DEVICE = torch_xla.device()
STEPS = 25
ROUNDING = 2e-5  # float32; two graphs of one function may round differently
NAMES = ("CompileTime", "ExecuteTime", "TransferFromDeviceTime")
ONE_EXECUTION = [0, 1, 0]


class Messages(logging.Handler):
    """Records graphstash's warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


MESSAGES = Messages()
logging.getLogger("graphstash").addHandler(MESSAGES)


def data(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)


Function = Callable[..., Tensor]


class Training:
    """A model with everything that scenarios need, traced or lazy."""

    def __init__(
        self,
        *,
        traced: bool,
        optimizer: str = "sgd",
        dropout: float = 0.0,
        width: int = 32,
        function: Function | None = None,
        donate: bool = True,
    ) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(16, width, bias=False), nn.BatchNorm1d(width), nn.Dropout(dropout))
        self.model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 1)).to(DEVICE)
        parameters = self.model.parameters()
        makers: dict[str, Callable[[], Any]] = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            "host rate": lambda: torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9),
            "adam": lambda: torch.optim.Adam(parameters, lr=0.01),
            "capturable": lambda: torch.optim.Adam(parameters, lr=0.01, capturable=True),
            "own": lambda: AdamW(parameters, lr=0.01),
        }
        self.optimizer = makers[optimizer]()
        self.calls = 0
        self.function = partial(function or Training.plain, self)
        self.step: Any = self.lazy_step
        if traced:
            self.step = traced_step(self.function, [self.model, self.optimizer], donate=donate)
        torch_xla.sync(wait=True)
        self.losses: list[float] = []
        self.counts: list[list[int]] = []
        self.total: Tensor | None = None

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def lazy_step(self, *batch: Tensor) -> Tensor:
        result = self.function(*batch)
        torch_xla.sync()
        return result

    def train(
        self,
        numbers: Iterable[int],
        *,
        size: Callable[[int], int] = lambda _: 8,
        after: Callable[[Any, int], object] = lambda *_: None,
    ) -> "Training":
        """Train on numbered batches; `after(training, number)` runs after each step."""
        for number in numbers:
            batch = [each.to(DEVICE) for each in data(number, size(number))]
            before = counts(*NAMES)
            loss = float(self.step(*batch).item())  # one read; the device is idle again
            change = [b - a for a, b in zip(before, counts(*NAMES), strict=True)]
            self.counts.append([*change[:2], change[2] - 1])
            self.losses.append(loss)
            after(self, number)
        return self

    def state(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        gradients = {f"grad {name}": p.grad for name, p in named if p.grad is not None}
        return {name: t.cpu() for name, t in (self.model.state_dict() | gradients).items()}


def difference(one: Training, other: Training) -> float:
    pairs = zip(one.losses, other.losses, strict=True)
    losses = max(abs(a - b) / max(1, abs(a)) for a, b in pairs)
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    tensors = max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1))
        for name in ours
    )
    return max(losses, tensors)


Scenario = Callable[[Training], Training]


def steady(training: Training) -> Training:
    return training.train(range(STEPS))


def require(
    scenario: Scenario = steady,
    *,
    limit: float = ROUNDING,
    calls: int | None = None,
    one_execution_from: int | None = None,
    warnings: int = 0,
    **options: Any,
) -> Training:
    """Run a scenario lazily and traced, require equal results, and return the traced training.

    Args:
        limit: the largest difference.
        calls: calls of the function, if the number is fixed.
        one_execution_from: first step from which each step is one execution.
        warnings: number of warnings.
    """
    trainings = {}
    for traced in (False, True):
        gc.collect()
        torch_xla.sync(wait=True)
        xm.set_rng_state(7, str(DEVICE))
        MESSAGES.texts.clear()
        trainings[traced] = scenario(Training(traced=traced, **options))
    made = trainings[True]
    assert difference(made, trainings[False]) <= limit
    assert calls in (None, made.calls), made.calls
    if one_execution_from is not None:
        assert made.counts[one_execution_from:] == [ONE_EXECUTION] * (STEPS - one_execution_from)
    assert len(MESSAGES.texts) == warnings, MESSAGES.texts
    if warnings == 0:
        assert (made.step.mode, made.step.reason) == ("traced", None)
    return made


def refuse(words: Sequence[str], scenario: Scenario = steady, **options: Any) -> None:
    """Require that the step is refused with a reason that contains the words, and trains lazily."""
    made = require(scenario, calls=STEPS, warnings=1, **options)
    assert made.step.mode == "lazy"
    assert all(word in made.step.reason for word in words), made.step.reason
    assert MESSAGES.texts == [f"running the training step untraced: {made.step.reason}"]


def compiled_once() -> None:
    """Require equal bits if the step clears its gradients, which are then no output of a graph."""
    made = require(function=clearing, limit=0)
    assert sum(compiles for compiles, _, _ in made.counts[1:]) == 1


def many_shapes() -> None:
    """Use one shape more than the limit. The first shapes keep their graphs."""
    bounds: Any = xla
    structures = bounds.STRUCTURES
    modes: list[Any] = []

    def sizes(number: int) -> int:
        return 4 + number % 4

    def note(training: Training, _: int) -> None:
        modes.append(getattr(training.step, "mode", None))

    def scenario(training: Training) -> Training:
        training.train(range(STEPS), size=sizes)
        modes.clear()
        return training.train(range(4), size=sizes, after=note)

    bounds.STRUCTURES = 3
    try:
        require(scenario, warnings=1)
    finally:
        bounds.STRUCTURES = structures
    assert sorted(modes) == ["lazy", "traced", "traced", "traced"]
    assert "more than 3 structures" in MESSAGES.texts[0]


def scheduled(training: Training) -> Training:
    """Change the learning rate with every step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    return training.train(range(STEPS), after=lambda *_: schedule.step())


def rare_schedule() -> None:
    """Change an optimizer's number on the host twice. Each change records the step again."""

    def scenario(training: Training) -> Training:
        schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 10, 0.1)
        return training.train(range(STEPS), after=lambda *_: schedule.step())

    made = require(scenario, calls=3 + 2 * 2)
    assert sum(compiles for compiles, _, _ in made.counts[3:]) == 0


# Functions of a step.


def branching(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Let Python choose the computation."""
    loss = training.plain(x, y)
    return loss * 2 if training.calls % 2 else loss


def with_step_number(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Use another Python number in every step."""
    return training.plain(x, y * (1 + 0.5**training.calls))


def with_outside_state(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Change a tensor that is neither a parameter nor a buffer."""
    loss = training.plain(x, y)
    if training.total is None:
        training.total = torch.zeros((), device=DEVICE)
    training.total += loss.detach()
    return loss + 0 * training.total


def reading(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = training.plain(x, y)
    return loss * 1.0 if loss.item() > 0 else loss


def syncing(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = training.plain(x, y)
    torch_xla.sync()
    return loss * 1.0


def scheduling(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = training.plain(x, y)
    training.optimizer.param_groups[0]["lr"] *= 0.9
    return loss


def clearing(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = training.plain(x, y)
    training.optimizer.zero_grad()
    return loss


def clipping(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss = functional.mse_loss(training.model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
    training.optimizer.step()
    return loss.detach()


def accumulating(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Add up gradients until the loop clears them."""
    loss = functional.mse_loss(training.model(x), y)
    loss.backward()
    return loss


# Events between steps.


def cleared_outside(training: Training) -> Training:
    def after(training: Training, number: int) -> None:
        if number % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()

    return training.train(range(STEPS), after=after)


def to_host(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), tree)


def interrupted(training: Training) -> Training:
    """Evaluate, change tensors in place and through a view, save, ignore results, and clone."""
    last: Any = training.model[4]
    weight, kept = last.weight, {}

    def after(training: Training, number: int) -> None:
        if number == 8:
            training.model.eval()
            training.losses.append(training.model(data(99)[0].to(DEVICE)).sum().item())
            training.model.train()
        if number == 10:
            with torch.no_grad():
                weight.mul_(0.5)
        if number == 12:
            weight.data[0].zero_()
        if number == 14:
            kept["model"] = to_host(training.model.state_dict())
            kept["optimizer"] = to_host(training.optimizer.state_dict())
        if number == 18:
            training.model.load_state_dict(kept["model"])
            training.optimizer.load_state_dict(kept["optimizer"])
        if number == 21:  # computed later, from the weight's present value
            kept["norm"], kept["clone"] = weight.norm(), weight.detach().clone()
            kept["flat"] = weight.detach().view(-1)
        if number == 22:
            training.losses += [kept["norm"].item(), kept["clone"].sum().item()]

    return training.train(range(STEPS), after=after)


def replaced(training: Training) -> Training:
    """Put other tensors in places of the state between steps, and change a number on the host."""

    def after(training: Training, number: int) -> None:
        if number == 8:
            training.optimizer.state.clear()
        if number == 13:
            norm: Any = training.model[1]
            norm.running_mean = norm.running_mean * 0.5
        if number == 17:
            for _ in range(2):
                training.optimizer.load_state_dict(to_host(training.optimizer.state_dict()))
        if number == 21:
            training.optimizer.param_groups[0]["lr"].mul_(0.1)

    return training.train(range(STEPS), after=after)


def drawing(training: Training) -> Training:
    """Draw random numbers on the device between steps. The steps' random numbers continue."""

    def after(training: Training, number: int) -> None:
        if number in (1, 9):
            training.losses.append(torch.rand((), device=DEVICE).item())

    return training.train(range(STEPS), after=after)


def kept_state_dictionaries() -> None:
    """Require that state dictionaries continue to show the parameters, as on plain torch."""
    for optimizer in ("sgd", "own"):
        training = Training(traced=True, optimizer=optimizer)
        before = training.model.state_dict()
        training.train(range(3))
        during = training.model.state_dict()
        training.train(range(3, 10))
        now = training.state()
        for kept in (before, during) if optimizer == "sgd" else (during,):
            assert all(torch.equal(kept[name].cpu(), now[name]) for name in kept)


def donation() -> None:
    """Require that state is overwritten in place if it is donated, and only then."""
    for donate in (True, False):
        # A unique width, so that this graph must be compiled here.
        training = Training(traced=True, optimizer="capturable", donate=donate, width=24)
        training.train(range(2))
        samples = xla_metrics.metric_data("InputOutputAliasCount")[2]
        training.train(range(2, 6))
        model = [*training.model.parameters(), *training.model.buffers()]
        state = sum(len(each) for each in training.optimizer.state.values())
        assert samples[-1][1] == (len(model) + state if donate else 0)


def dropout_repeats() -> None:
    """Require different random numbers in each step, which a restored random state repeats."""
    x, _ = (each.to(DEVICE) for each in data(0))
    noise = torch.zeros(4, device=DEVICE)
    torch_xla.sync()
    draw = traced_step(lambda x: functional.dropout(x, 0.5), [noise])
    xm.set_rng_state(11, str(DEVICE))
    outputs, state = [], 0
    for number in range(8):
        if number == 5:
            state = xm.get_rng_state(str(DEVICE))
        outputs.append(draw(x).cpu())
    xm.set_rng_state(state, str(DEVICE))
    again = [draw(x).cpu() for _ in range(3)]
    assert draw.mode == "traced"
    assert len({output.numpy().tobytes() for output in outputs}) == 8
    assert all(map(torch.equal, again, outputs[5:]))


def structures() -> None:
    """Require that results keep their structure, constants, batch and state included."""
    state = torch.ones(4, device=DEVICE)
    constant = torch.full((2,), 3.0, device=DEVICE)
    torch_xla.sync()

    def function(batch: Any, *, _unused: object = None) -> dict[str, Any]:
        state.add_(batch["x"][0])
        return {
            "sum": state.sum(),
            "pair": (state * 2, None),
            "constant": 5,
            "x": batch["x"][0],
            "state": state,
            "outside": constant,
        }

    step = traced_step(function, [state])
    total = 4.0
    for number in range(6):
        x = torch.full((4,), float(number), device=DEVICE)
        result = step({"x": [x], "scale": 2, "flag": None})
        total += 4 * number
        assert result["sum"].item() == result["state"].sum().item() == total
        assert result["pair"][0][0].item() == total / 2
        assert (result["pair"][1], result["constant"]) == (None, 5)
        assert result["x"] is x
        assert result["outside"].sum().item() == 6
    assert step.mode == "traced"


def one_program() -> None:
    """Require that gradients and updates of a step are one program, and that fuse() reports it."""
    found = []

    def dumped(training: Training, *batch: Tensor) -> Tensor:
        result = training.plain(*batch)
        parameters = list(training.model.parameters())
        found.append(torch_xla._XLAC._get_xla_tensors_hlo(parameters))
        return result

    training = steady(Training(traced=True, optimizer="own", function=dumped))
    assert (training.step.mode, training.counts[-1]) == ("traced", ONE_EXECUTION)
    for hlo in found:
        require_one_computation(hlo)
    for when in ("backward", "forward"):
        message = error_of(partial(fuse, training.model, training.optimizer, when))
        assert "fuse() does not apply to parameters on xla:0" in message
        assert "use training.traced_step" in message


def require_one_computation(hlo: str) -> None:
    """Require that one computation of a program has gradients, the update, and its results."""
    assert hlo.count("HloModule ") == 1
    entry = hlo[hlo.index("ENTRY ") :]
    # name, kind, and the rest of the line: operands and attributes
    lines = re.findall(r"^ *(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((.*)$", entry, re.MULTILINE)
    kinds = {name: kind for name, kind, _ in lines}
    operands = {name: re.findall(r"%[\w.-]+", rest) for name, _, rest in lines}
    (update,) = [name for name, kind, rest in lines if kind == "call" and "%adam" in rest]
    seen: set[str] = set()
    todo = [update]
    while todo:  # everything from which the update is computed
        new = set(operands.get(todo.pop(), ())) - seen
        seen |= new
        todo += new
    # For two layers: two forward products, the gradients of both weights and of the layer between.
    assert [kinds.get(each) for each in seen].count("dot") == 5
    (root,) = re.findall(r"^ *ROOT .*? tuple\((.*)$", entry, re.MULTILINE)
    elements = [name for name in kinds if kinds[name] == "get-tuple-element"]
    results = [name for name in elements if update in operands[name]]
    returned = f"{root},".replace(")", ",")
    assert sum(f"{name}," in returned for name in results) >= 5  # the parameters


def batches_that_cannot_be_followed() -> None:
    state = torch.ones(4, device=DEVICE)
    for batch, word in (
        (object(), "object is in the batch"),
        (torch.ones(4), "move it to the device"),
    ):
        step = traced_step(lambda x: state.add_(1).sum(), [state])
        for _ in range(6):
            step(batch)
        assert step.mode == "lazy"
        assert word in str(step.reason)


def retracing() -> None:
    """Require that a Python value stays constant until the step is traced again."""
    state = torch.zeros((), device=DEVICE)
    amount = 1.0
    step = traced_step(lambda: state.add_(amount).clone(), [state])
    assert [step().item() for _ in range(5)] == [1, 2, 3, 4, 5]
    amount = 10.0
    assert step().item() == 6
    step.retrace()
    steps = [(step().item(), step.mode) for _ in range(4)]
    assert steps == [(16, "recording"), (26, "recording"), (36, "traced"), (46, "traced")]


def failing() -> None:
    """Require that an error during recording is raised, and that training continues."""
    training = Training(traced=True)
    function = training.step._function

    def fails_once(x: Tensor, y: Tensor) -> Any:
        if training.calls == 1:
            training.calls += 1
            raise ValueError("a bad batch")
        return function(x, y)

    training.step._function = fails_once
    training.train([0])
    assert error_of(lambda: training.train([1])) == "ValueError: a bad batch"
    training.train(range(2, 8))
    assert training.step.mode == "traced"
    other = Training(traced=False).train([0, *range(2, 8)])
    assert difference(training, other) < ROUNDING


def eager() -> None:
    torch_xla.experimental.eager_mode(True)
    try:
        step = Training(traced=True).step
        reason = "torch_xla runs in eager mode; use torch_xla.compile"
        assert (step.mode, step.reason) == ("lazy", reason)
    finally:
        torch_xla.experimental.eager_mode(False)


STEADY: dict[str, Any] = {"calls": 3, "one_execution_from": 3}
CHECKS: dict[str, Callable[[], object]] = {
    "sgd": partial(require, **STEADY),
    "capturable": partial(require, optimizer="capturable"),
    "own": partial(require, optimizer="own", **STEADY),
    "clipping": partial(require, function=clipping),
    "clearing": compiled_once,
    "dropout and draws": partial(require, drawing, dropout=0.3),
    "many shapes": many_shapes,
    "schedule": partial(require, scheduled, optimizer="own", **STEADY),
    "rare schedule": rare_schedule,
    "accumulating": partial(require, cleared_outside, function=accumulating),
    "interrupted": partial(require, interrupted, optimizer="own"),
    "replaced": partial(require, replaced, optimizer="host rate"),
    "branching": partial(refuse, ["graph differs from one step to the next"], function=branching),
    "step number": partial(
        refuse,
        ["1.25 in one step and 1.125 in the next", "tensor on the device"],
        function=with_step_number,
    ),
    "frequent schedule": partial(
        refuse, ["-0.0405", "-0.03644", "optimizers of graphstash.training"], scheduled
    ),
    "host step count": partial(
        refuse,
        ["`a tensor of Adam`, or changes it on the host", "capturable=True"],
        optimizer="adam",
    ),
    "outside state": partial(
        refuse, ["not in `state` (1: float32[])"], function=with_outside_state
    ),
    "reading": partial(refuse, ["reads the device (item in ", "traced.py:"], function=reading),
    "syncing": partial(
        refuse, ["makes the device compute before the step is complete"], function=syncing
    ),
    "scheduling": partial(
        refuse, ["changes an option of an optimizer"], optimizer="own", function=scheduling
    ),
    "kept state dictionaries": kept_state_dictionaries,
    "donation": donation,
    "dropout repeats": dropout_repeats,
    "structures": structures,
    "batches": batches_that_cannot_be_followed,
    "retracing": retracing,
    "failing": failing,
    "one program": one_program,
    "eager": eager,
}


def checks(*, names: list[str]) -> dict[str, str]:
    """Run checks, and return the traceback of each, or "" if it passed."""
    gc.disable()
    errors = {}
    for name in names:
        try:
            CHECKS[name]()
        except Exception:
            torch_xla.sync()
            errors[name] = traceback.format_exc()
        else:
            errors[name] = ""
    return errors


def share() -> dict[str, Any]:
    """Train in a job whose artifacts another host may load."""
    gc.disable()
    training = Training(traced=True).train(range(10))
    assert training.step.mode == "traced"
    (uncached,) = counts("UncachedCompile")
    return {"counts": training.counts, "losses": training.losses, "uncached": uncached}
