"""Traces training steps in many ways, each beside the same training step by step; reports numbers.

One process for all of them: importing torch_xla takes longer than they do. With `--share` it only
trains, for what a cache makes of it.
"""

import argparse
import gc
import json
import logging
import re
import traceback
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch import nn
from torch.nn import functional

from graphstash.training.fusion import FusionError, fuse
from graphstash.training.optimizers import AdamW
from graphstash.training.traced import traced_step, xla

STRUCTURES = xla.STRUCTURES
DEVICE = torch_xla.device()
STEPS = 25
METRICS = ("CompileTime", "ExecuteTime", "TransferFromDeviceTime")


class Messages(logging.Handler):
    """Keeps what graphstash has warned of."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


MESSAGES = Messages()
logging.getLogger("graphstash").addHandler(MESSAGES)


class Training:
    """A model and everything that a scenario may want to do with it, traced or step by step."""

    def __init__(
        self, *, traced, optimizer="sgd", dropout=0.0, width=32, function=None, donate=True
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, width, bias=False),
            nn.BatchNorm1d(width),
            nn.Dropout(dropout),
            nn.Tanh(),
            nn.Linear(width, 1),
        ).to(DEVICE)
        parameters = self.model.parameters()
        self.optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            "adam": lambda: torch.optim.Adam(parameters, lr=0.01),
            "capturable": lambda: torch.optim.Adam(parameters, lr=0.01, capturable=True),
            "own": lambda: AdamW(parameters, lr=0.01),
        }[optimizer]()
        self.calls = 0
        function = function or Training.plain
        self.function = lambda *batch: function(self, *batch)
        self.step = self.lazy_step
        if traced:
            self.step = traced_step(self.function, [self.model, self.optimizer], donate=donate)
        torch_xla.sync(wait=True)
        self.losses = []
        self.counts = []

    def plain(self, x, y):
        self.calls += 1
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def lazy_step(self, *batch):
        result = self.function(*batch)
        torch_xla.sync()
        return result

    def train(self, numbers, *, size=8, after=None):
        """Trains on numbered batches; `after(training, number)` runs after each step."""
        for number in numbers:
            batch = [x.to(DEVICE) for x in data(number, size(number) if callable(size) else size)]
            self.losses.append(self.counted(lambda batch=batch: self.step(*batch)))
            if after is not None:
                after(self, number)
        return self

    def counted(self, call):
        before = counts()
        loss = call()
        loss = loss.item()  # the device is idle again; one read, not counted
        self.counts.append([b - a for a, b in zip(before, counts(), strict=True)])
        self.counts[-1][2] -= 1
        return loss

    def state(self):
        gradients = {
            f"grad {name}": p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        tensors = self.model.state_dict() | gradients
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def report(self):
        mode, reason = getattr(self.step, "mode", None), getattr(self.step, "reason", None)
        return {
            "mode": mode,
            "reason": reason,
            "calls": self.calls,
            "counts": self.counts,
            "last_modes": getattr(self, "last_modes", None),
        }


def data(number, size=8):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 16, generator=generator)
    return x, x.sum(1, keepdim=True)


def counts():
    found = [xla_metrics.metric_data(name) for name in METRICS]
    return [data[0] if data else 0 for data in found]


def difference(one, other):
    """The largest difference of two trainings, relative to the size of what differs."""
    losses = max(abs(a - b) / max(1, abs(a)) for a, b in zip(one.losses, other.losses, strict=True))
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    tensors = max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1))
        for name in ours
    )
    return max(losses, tensors)


def both(scenario, **options):
    """Runs a scenario step by step and traced; what the traced one was, and how they differ."""
    trainings = {}
    for traced in (False, True):
        gc.collect()
        torch_xla.sync(wait=True)
        xm.set_rng_state(7, str(DEVICE))
        MESSAGES.texts.clear()
        trainings[traced] = scenario(Training(traced=traced, **options))
    report = trainings[True].report() | {"warnings": list(MESSAGES.texts)}
    return report | {"difference": difference(trainings[True], trainings[False])}


def steady(training):
    return training.train(range(STEPS))


def two_shapes(training):
    return training.train(range(STEPS), size=lambda number: 8 if number % 2 else 6)


def many_shapes(training):
    """One shape more than there may be; those that came first keep their graphs."""
    xla.STRUCTURES = 3
    training.train(range(STEPS), size=lambda number: 4 + number % 4)
    training.last_modes = []

    def note(training, _number):
        training.last_modes.append(getattr(training.step, "mode", None))

    training.train(range(4), size=lambda number: 4 + number % 4, after=note)
    xla.STRUCTURES = STRUCTURES
    return training


def scheduled(training):
    """The learning rate of our own optimizer changes with every step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    return training.train(range(STEPS), after=lambda *_: schedule.step())


def rarely_scheduled(training):
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 10, 0.1)
    return training.train(range(STEPS), after=lambda *_: schedule.step())


def branching(training, x, y):
    """Python decides what is computed."""
    loss = Training.plain(training, x, y)
    return loss * 2 if training.calls % 2 else loss


def with_step_number(training, x, y):
    """A Python number of its own in every step."""
    return Training.plain(training, x, y * (1 + 0.5**training.calls))


def with_outside_state(training, x, y):
    """Changes a tensor that nobody was told of."""
    loss = Training.plain(training, x, y)
    if training.calls == 1:
        training.total = torch.zeros((), device=DEVICE)
    training.total += loss.detach()
    return loss + 0 * training.total


def reading(training, x, y):
    loss = Training.plain(training, x, y)
    return loss * 1.0 if loss.item() > 0 else loss


def syncing(training, x, y):
    loss = Training.plain(training, x, y)
    torch_xla.sync()
    return loss * 1.0


def scheduling(training, x, y):
    loss = Training.plain(training, x, y)
    training.optimizer.param_groups[0]["lr"] *= 0.9
    return loss


def clearing(training, x, y):
    loss = Training.plain(training, x, y)
    training.optimizer.zero_grad()
    return loss


def clipping(training, x, y):
    training.optimizer.zero_grad()
    loss = functional.mse_loss(training.model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
    training.optimizer.step()
    return loss.detach()


def accumulating(training, x, y):
    """Gradients add up until somebody clears them."""
    loss = functional.mse_loss(training.model(x), y)
    loss.backward()
    return loss


def cleared_outside(training):
    def after(training, number):
        if number % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()

    return training.train(range(STEPS), after=after)


def interrupted(training):
    """Between steps: evaluation, changes of every kind, state dictionaries."""
    weight = training.model[4].weight
    training.seen = []

    def after(training, number):
        if number == 8:
            training.model.eval()
            x, _ = data(99)
            training.losses.append(training.model(x.to(DEVICE)).sum().item())
            training.model.train()
        if number == 10:
            with torch.no_grad():
                weight.mul_(0.5)
        if number == 12:
            weight.data[0].zero_()
        if number == 14:
            training.saved = {k: v.cpu() for k, v in training.model.state_dict().items()}
            training.saved_optimizer = training.optimizer.state_dict()
            training.saved_optimizer = to_host(training.saved_optimizer)
        if number == 18:
            training.model.load_state_dict(training.saved)
            training.optimizer.load_state_dict(training.saved_optimizer)
        if number == 21:
            training.norm = weight.norm()  # computed later, from the weight as it is now
            training.clone = weight.detach().clone()
            training.flat = weight.detach().view(-1)
        if number == 22:
            training.losses += [training.norm.item(), training.clone.sum().item()]

    return training.train(range(STEPS), after=after)


def with_target(training):
    """A second network takes over the first one's parameters now and then."""
    target = nn.Linear(32, 1).to(DEVICE)

    def after(training, number):
        if number in (2, 9, 10):
            target.load_state_dict(training.model[4].state_dict())
        if number == 15:
            training.model[4].load_state_dict(target.state_dict())
        with torch.no_grad():
            training.losses.append(target.weight.sum().item())

    return training.train(range(STEPS), after=after)


def drawing(training):
    """Draws random numbers on the device between steps."""

    def after(training, number):
        if number in (1, 9):
            training.losses.append(torch.rand((), device=DEVICE).item())

    return training.train(range(STEPS), after=after)


def to_host(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), tree)


def aliases():
    """A state dictionary that is kept goes on showing the parameters, as on plain torch."""
    reports = {}
    for optimizer in ("sgd", "own"):
        training = Training(traced=True, optimizer=optimizer)
        before = training.model.state_dict()
        training.train(range(3))
        during = training.model.state_dict()
        training.train(range(3, 10))
        now = training.state()
        for name, kept in (("before", before), ("during", during)):
            reports[f"{optimizer} {name}"] = all(torch.equal(kept[k].cpu(), now[k]) for k in kept)
    return reports


def donation():
    """How many of the graph's arguments may be overwritten, with and without donation."""
    reports = {}
    for donate in (True, False):
        # A width of its own: this graph must be compiled here.
        training = Training(traced=True, optimizer="capturable", donate=donate, width=24)
        training.train(range(2))
        samples = xla_metrics.metric_data("InputOutputAliasCount")[2]
        training.train(range(2, 6))
        reports[str(donate)] = {
            "aliases": samples[-1][1],
            "state": len(list(training.model.parameters()))
            + len(list(training.model.buffers()))
            + sum(len(state) for state in training.optimizer.state.values()),
            "mode": training.step.mode,
        }
    return reports


def dropout_repeats():
    """The same random state gives the same numbers again, and other numbers in every step."""
    outputs = []
    x, _ = (t.to(DEVICE) for t in data(0))
    noise = torch.zeros(4, device=DEVICE)
    torch_xla.sync()
    draw = traced_step(lambda x: functional.dropout(x, 0.5), [noise])
    xm.set_rng_state(11, str(DEVICE))
    for number in range(8):
        if number == 5:
            state = xm.get_rng_state(str(DEVICE))
        outputs.append(draw(x).cpu())
    xm.set_rng_state(state, str(DEVICE))
    again = [draw(x).cpu() for _ in range(3)]
    return {
        "mode": draw.mode,
        "distinct": len({o.numpy().tobytes() for o in outputs}),
        "repeated": all(torch.equal(a, b) for a, b in zip(again, outputs[5:], strict=True)),
    }


def structures():
    """Results keep their form; so do constants, the batch and the state in them."""
    state = torch.ones(4, device=DEVICE)
    constant = torch.full((2,), 3.0, device=DEVICE)
    torch_xla.sync()

    def function(batch, *, _unused=None):
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
    rows = []
    for number in range(6):
        x = torch.full((4,), float(number), device=DEVICE)
        result = step({"x": [x], "scale": 2, "flag": None})
        rows.append(
            [
                result["sum"].item(),
                result["pair"][0][0].item(),
                result["pair"][1],
                result["constant"],
                result["x"] is x,
                result["state"].sum().item(),
                result["outside"].sum().item(),
            ]
        )
    return {"mode": step.mode, "reason": step.reason, "rows": rows}


def one_program():
    """Where a step's gradients and its updates are; what fuse() says of it."""
    found = []

    def dumped(training, *batch):
        result = training.plain(*batch)
        parameters = list(training.model.parameters())
        found.append(updates_in(torch_xla._XLAC._get_xla_tensors_hlo(parameters)))
        return result

    training = steady(Training(traced=True, optimizer="own", function=dumped))
    refused = []
    for when in ("backward", "forward"):
        try:
            fuse(training.model, training.optimizer, when)
        except FusionError as error:
            refused.append(str(error))
    return training.report() | {"programs": found, "refused": refused}


def updates_in(hlo):
    """Of a program in text: whether one computation has gradients, the update, and its results."""
    modules = hlo.count("HloModule ")
    entry = hlo[hlo.index("ENTRY ") :]
    # name, kind, and the rest of the line: operands and attributes
    lines = re.findall(r"^ *(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((.*)$", entry, re.MULTILINE)
    kinds = {name: kind for name, kind, _ in lines}
    operands = {name: re.findall(r"%[\w.-]+", rest) for name, _, rest in lines}

    def sources(name):
        """Everything that a value is computed of, in this computation."""
        seen, todo = set(), [name]
        while todo:
            for operand in operands.get(todo.pop(), ()):
                if operand not in seen:
                    seen.add(operand)
                    todo.append(operand)
        return [kinds.get(each) for each in seen]

    (update,) = [name for name, kind, rest in lines if kind == "call" and "%adam" in rest]
    elements = [name for name in kinds if kinds[name] == "get-tuple-element"]
    results = [name for name in elements if update in operands[name]]
    (root,) = re.findall(r"^ *ROOT .*? tuple\((.*)$", entry, re.MULTILINE)
    return {
        "modules": modules,
        "dots before the update": sources(update).count("dot"),
        "results": sum(f"{name}," in f"{root},".replace(")", ",") for name in results),
    }


def refusals_of_batches():
    reasons = {}
    state = torch.ones(4, device=DEVICE)
    for name, batch in (("object", object()), ("host tensor", torch.ones(4))):
        step = traced_step(lambda x: state.add_(1).sum(), [state])
        for _ in range(6):
            step(batch)
        reasons[name] = [step.mode, step.reason]
    return reasons


def retracing():
    state = torch.zeros((), device=DEVICE)
    amount = 1.0
    step = traced_step(lambda: state.add_(amount).clone(), [state])
    before = [step().item() for _ in range(5)]
    amount = 10.0
    stale = step().item()
    step.retrace()
    modes = []
    after = []
    for _ in range(4):
        after.append(step().item())
        modes.append(step.mode)
    return {"before": before, "stale": stale, "after": after, "modes": modes}


def failing():
    """The function raises once while it is recorded; the training goes on."""
    training = Training(traced=True)
    function = training.step._function

    def fails_once(x, y):
        if training.calls == 1:
            training.calls += 1
            raise ValueError("a bad batch")
        return function(x, y)

    training.step._function = fails_once
    training.train([0])
    try:
        training.train([1])
        raised = None
    except ValueError as error:
        raised = str(error)
    training.train(range(2, 8))
    other = Training(traced=False).train([0, *range(2, 8)])
    return {
        "raised": raised,
        "mode": training.step.mode,
        "difference": difference(training, other),
    }


def eager():
    """In torch_xla's eager mode there is nothing to record."""
    torch_xla.experimental.eager_mode(True)
    try:
        training = Training(traced=True)
        return {"reason": training.step.reason, "mode": training.step.mode}
    finally:
        torch_xla.experimental.eager_mode(False)


SCENARIOS = {
    "sgd": lambda: both(steady),
    "capturable": lambda: both(steady, optimizer="capturable"),
    "own": lambda: both(steady, optimizer="own"),
    "undonated": lambda: both(steady, donate=False),
    "dropout and draws": lambda: both(drawing, dropout=0.3),
    "two shapes": lambda: both(two_shapes),
    "many shapes": lambda: both(many_shapes),
    "schedule": lambda: both(scheduled, optimizer="own"),
    "rare schedule": lambda: both(rarely_scheduled),
    "frequent schedule": lambda: both(scheduled),
    "branching": lambda: both(steady, function=branching),
    "step number": lambda: both(steady, function=with_step_number),
    "host step count": lambda: both(steady, optimizer="adam"),
    "outside state": lambda: both(steady, function=with_outside_state),
    "reading": lambda: both(steady, function=reading),
    "syncing": lambda: both(steady, function=syncing),
    "scheduling": lambda: both(steady, optimizer="own", function=scheduling),
    "clearing": lambda: both(steady, function=clearing),
    "clearing and dropout": lambda: both(steady, function=clearing, dropout=0.3),
    "clipping": lambda: both(steady, function=clipping),
    "accumulating": lambda: both(cleared_outside, function=accumulating),
    "interrupted": lambda: both(interrupted),
    "interrupted own": lambda: both(interrupted, optimizer="own"),
    "target": lambda: both(with_target),
    "aliases": aliases,
    "donation": donation,
    "dropout repeats": dropout_repeats,
    "structures": structures,
    "batches": refusals_of_batches,
    "retracing": retracing,
    "failing": failing,
    "one program": one_program,
    "eager": eager,
}


def attempt(scenario):
    """One scenario that fails must not take the others with it."""
    try:
        return scenario()
    except Exception:
        torch_xla.sync()
        return {"error": traceback.format_exc()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--part", type=int, help="every second scenario, from this one on")
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    options = parser.parse_args()
    gc.disable()
    if options.share:
        training = Training(traced=True).train(range(10))
        report = training.report() | {
            "losses": training.losses,
            "uncached": torch_xla._XLAC._xla_counter_value("UncachedCompile") or 0,
        }
    else:
        names = options.only if options.part is None else options.only[options.part :: 2]
        report = {name: attempt(SCENARIOS[name]) for name in names}
    options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
