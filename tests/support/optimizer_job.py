"""Puts the sync-free optimizers, the loss scale and clipping through their paces on torch_xla.

One process for all of it, because torch_xla takes long to import. Every function named in CHECKS
gives something that fits into JSON; the tests compare it with plain torch.
"""

import argparse
import copy
import gc
import json
import math
import pickle
import sys
import time
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch import nn

from graphstash.training import device
from graphstash.training.optimizers import (
    LAMB,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    Shampoo,
)
from graphstash.training.optimizers.gradients import LossScale, clip_grad_norm_, clip_grad_value_

sys.path.insert(0, str(Path(__file__).parents[1]))  # so under PYTHONSAFEPATH too

from support.optimizer_cases import (
    BY_HAND,
    CASES,
    NOT_IN_TORCH,
    SCHEDULES,
    gradients,
    loss_of,
    new_parameters,
    train_scheduled,
)

STEPS = 12
BAD = {0: math.inf, 5: math.inf, 7: math.nan}


def count(name):
    data = xla_metrics.metric_data(name)
    return int(data[0]) if data else xla_metrics.counter_value(name) or 0


def counts():
    xm.wait_device_ops()  # an execution is counted when it is over
    names = ("UncachedCompile", "ExecuteTime", "TransferFromDeviceTime", "TransferToDeviceTime")
    return [count(name) for name in names]


class Counter:
    """Counts per step: compiles, executions, reads of the device, uploads."""

    def __init__(self):
        self.steps = []
        self._before = counts()

    def skip(self):
        self._before = counts()

    def next(self):
        now = counts()
        self.steps.append([b - a for a, b in zip(self._before, now, strict=True)])
        self._before = now


def on_host(tensors):
    return [t.detach().cpu() for t in tensors]


def numbers(tensors):
    return [t.double().flatten().tolist() for t in on_host(tensors)]


def to_device(values):
    device = torch_xla.device()
    return [None if v is None else v.to(device) for v in values]


def state_of(optimizer):
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for value in optimizer.state[parameter].values()
    ]


def train(parameters, optimizer, scale, *, steps=STEPS, bad=BAD, before=None, after=None):
    """Trains; `before` and `after` are called in every step with its number."""
    for step in range(steps):
        factors = to_device(gradients(step, bad=bad.get(step)))
        if before:
            before(step)
        optimizer.zero_grad()
        scale.scale(loss_of(parameters, factors)).backward()
        found_inf = scale.step(optimizer)
        scale.update()
        del factors, found_inf
        torch_xla.sync()
        if after:
            after(step)


def new_scale(**options):
    return LossScale(8.0, growth_interval=3, **options).to(torch_xla.device())


def counted(case):
    """A run without a look at it, then the same again, looked at."""
    torch_xla.sync(wait=True)
    parameters = new_parameters(torch_xla.device())
    optimizer, scale, counter = case.ours(parameters), new_scale(), Counter()
    train(parameters, optimizer, scale, after=lambda step: counter.next())
    again = new_parameters(torch_xla.device())
    optimizer, scale = case.ours(again), new_scale()
    scales, unchanged, held = [], {}, {}

    def everything():
        return on_host([*again, *state_of(optimizer)])

    def before(step):
        if step in BAD and step:
            held["before"] = everything()

    def after(step):
        scales.append(scale.get_scale())
        if step == 0:
            first = [*on_host(new_parameters()), *(torch.zeros_like(s) for s in everything()[4:])]
            held["before"] = first
        if step in BAD:
            pairs = zip(held["before"], everything(), strict=True)
            unchanged[step] = all(torch.equal(*pair) for pair in pairs)

    compiles = count("UncachedCompile")
    train(again, optimizer, scale, before=before, after=after)
    return {
        "counts": counter.steps,
        "parameters": numbers(parameters),
        "again": numbers(again),
        "scales": scales,
        "unchanged": unchanged,
        "compiles_again": count("UncachedCompile") - compiles,
        "steps": sorted({float(optimizer.state[p]["step"]) for p in again}),
    }


def matrix():
    return {name: counted(case) for name, case in CASES.items()}


def scheduled():
    """Every schedule, on the same graph."""
    reports = {}
    for name, options in (("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.1})):
        for schedule, make in (SCHEDULES | BY_HAND).items():
            parameters = new_parameters(torch_xla.device())
            optimizer = CASES_BY_NAME[name](parameters, **options)
            counter = Counter()

            def after(counter=counter):
                torch_xla.sync()
                counter.next()

            train_scheduled(optimizer, make(optimizer), parameters, after=after)
            reports[f"{name} {schedule}"] = {
                "counts": counter.steps,
                "parameters": numbers(parameters),
            }
    return reports


def clipped():
    """By norm and by value, between unscale_ and step; some gradients are not finite."""
    reports = {}
    for name, clip in (
        ("norm", lambda p: clip_grad_norm_(p, 0.5)),
        ("value", lambda p: clip_grad_value_(p, 0.3)),
    ):
        parameters = new_parameters(torch_xla.device())
        optimizer, scale, counter = AdamW(parameters, lr=0.1), new_scale(), Counter()
        norms, held = [], []
        for step in range(6):
            factors = to_device(gradients(step, bad=BAD.get(step)))
            optimizer.zero_grad()
            scale.scale(loss_of(parameters, factors)).backward()
            scale.unscale_(optimizer)
            norm = clip(parameters)
            scale.step(optimizer)
            scale.update()
            del factors
            torch_xla.sync()
            counter.next()
            if norm is not None:
                norms.append(norm)
            held = [p.grad for p in parameters]
            if step == 4:
                last = numbers(held)
                counter.skip()
        reports[name] = {
            "counts": counter.steps,
            "parameters": numbers(parameters),
            "gradients": last,
            "norms": [float(norm) for norm in norms],
        }
    return reports


def aliases():
    """What the graph of a step writes over, where it may: everything that the step changes."""
    default, device.donates = device.donates, lambda: True

    def aliased():
        data = xla_metrics.metric_data("InputOutputAliasCount")
        return int(data[1]) if data else 0

    reports = {}
    for name, options in (
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("LAMB", {}),
        ("Lion", {}),
        ("Adafactor", {}),
        ("ScheduleFreeAdamW", {}),
    ):
        parameters = [nn.Parameter(torch.randn(n, 11).to(torch_xla.device())) for n in (7, 9)]
        optimizer, scale = CASES_BY_NAME[name](parameters, lr=0.1, **options), new_scale()
        before = aliased()
        live = []
        for _ in range(4):
            optimizer.zero_grad()
            scale.scale(sum((p * p).sum() for p in parameters)).backward()
            scale.step(optimizer)
            scale.update()
            torch_xla.sync(wait=True)
            counters = ("CreateXlaTensor", "DestroyXlaTensor")
            created, destroyed = (xla_metrics.counter_value(name) or 0 for name in counters)
            live.append(created - destroyed)
        reports[name] = {
            "aliased": aliased() - before,
            "changed": len({id(t) for t in (*parameters, *state_of(optimizer))}) + 2,
            "live": live,
        }
    device.donates = default
    return reports


def aliases_of_parameters_follow():
    """What came from detach() and state_dict() before a step, after it."""
    parameter = nn.Parameter(torch.ones(3).to(torch_xla.device()))
    optimizer = SGD([parameter], lr=1.0)
    others = [parameter.detach(), parameter.data, nn.ParameterList([parameter]).state_dict()["0"]]
    parameter.data.mul_(2)  # through an alias
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    torch_xla.sync()
    return numbers([parameter, *others])


def exchanged():
    """Four steps by torch on the host, four by ours here, four by torch again."""
    reports = {}
    for name, case in CASES.items():
        if case.name in NOT_IN_TORCH:
            continue
        first = new_parameters()
        theirs = case.reference(first)
        plain_steps(first, theirs, range(4))
        here = [nn.Parameter(p.detach().to(torch_xla.device())) for p in first]
        ours = case.ours(here)
        ours.load_state_dict(theirs.state_dict())
        torch_xla.sync()
        counter = Counter()
        plain_steps(here, ours, range(4, 8), after=counter.next)
        last = [nn.Parameter(p.detach().cpu()) for p in here]
        theirs = case.reference(last)
        theirs.load_state_dict(ours.state_dict())
        plain_steps(last, theirs, range(8, 12))
        reports[name] = {"parameters": numbers(last), "counts": counter.steps}
    return reports


def plain_steps(parameters, optimizer, steps, *, dtype=torch.float32, after=None, missing=None):
    device = parameters[0].device
    for step in steps:
        factors = gradients(step, dtype=dtype, missing=(missing or {}).get(step, ()))
        factors = [None if g is None else g.to(device) for g in factors]
        optimizer.zero_grad()
        loss_of(parameters, factors).backward()
        optimizer.step()
        del factors
        if device.type == "xla":
            torch_xla.sync()
        if after:
            after()


def copies():
    """Four steps, then four each by a copy, an unpickled copy, and one from a state dictionary."""
    reports = {}
    for name, ours in CASES_BY_NAME.items():
        results = []
        for copied in (
            lambda p, o: (p, o),
            lambda p, o: copy.deepcopy((p, o)),
            lambda p, o: pickle.loads(pickle.dumps((p, o))),
            loaded,
        ):
            parameters = new_parameters(torch_xla.device())
            optimizer = ours(parameters, lr=0.1)
            plain_steps(parameters, optimizer, range(4))
            new, optimizer = copied(parameters, optimizer)
            plain_steps(new, optimizer, range(4, 8))
            untouched = numbers(parameters)
            results.append((numbers(new), untouched))
        reports[name] = results
    return reports


def loaded(parameters, optimizer):
    new = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = type(optimizer)(new, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    return new, other


def added_group():
    parameters = new_parameters(torch_xla.device())
    optimizer = AdamW(parameters[:2], lr=0.1)
    plain_steps(parameters, optimizer, range(3))
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
    counter = Counter()
    plain_steps(parameters, optimizer, range(3, 6), after=counter.next)
    return {"parameters": numbers(parameters), "counts": counter.steps}


def scalers():
    """The scalers of torch and torch_xla, with our optimizers."""
    import torch_xla.amp

    reports = {}
    for name, make in (
        ("torch", lambda: torch.amp.GradScaler("xla", init_scale=8.0, growth_interval=3)),
        ("torch_xla", lambda: torch_xla.amp.GradScaler(init_scale=8.0, growth_interval=3)),
    ):
        parameters = new_parameters(torch_xla.device())
        optimizer, scaler, counter = AdamW(parameters, lr=0.1), make(), Counter()
        for step in range(8):
            factors = to_device(gradients(step, bad=BAD.get(step)))
            optimizer.zero_grad()
            scaler.scale(loss_of(parameters, factors)).backward()
            scaler.step(optimizer)
            scaler.update()
            del factors
            torch_xla.sync()
            counter.next()
        reports[name] = {
            "counts": counter.steps,
            "parameters": numbers(parameters),
            "scale": scaler.get_scale(),
        }
    return reports


def dtypes():
    """Three steps in other precisions; shape [] is among the parameters'."""
    reports = {}
    for dtype in (torch.bfloat16, torch.float64):
        for name, ours in CASES_BY_NAME.items():
            parameters = new_parameters(torch_xla.device(), dtype=dtype)
            optimizer, counter = ours(parameters, lr=0.1), Counter()
            plain_steps(parameters, optimizer, range(3), dtype=dtype, after=counter.next)
            reports[f"{name} {dtype}"] = {
                "parameters": numbers(parameters),
                "dtypes": sorted({str(t.dtype) for t in (*parameters, *state_of(optimizer))}),
                "counts": counter.steps,
            }
    parameters = [
        nn.Parameter(torch.ones(shape, dtype=dtype).to(torch_xla.device()))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for shape in ((), (2,))
    ]
    optimizer, scale = AdamW(parameters, lr=0.1), new_scale()
    for _ in range(3):
        optimizer.zero_grad()
        scale.scale(sum(p.sum().float() for p in parameters)).backward()
        clip_grad_norm_(parameters, 1.0)
        scale.step(optimizer)
        scale.update()
        torch_xla.sync()
    reports["mixed"] = numbers(parameters)
    return reports


def found_inf_of_any_kind():
    """Which values of found_inf leave a step out."""
    left_out = {}
    device = torch_xla.device()
    parameters = new_parameters(device)
    optimizer = SGD(parameters, lr=0.1, momentum=0.5)
    for parameter, gradient in zip(parameters, gradients(0), strict=True):
        parameter.grad = gradient.to(device)
    for value in (0.0, 1.0, math.nan, False, True, 0, 3, [0.0], [1.0]):
        before = on_host(parameters)
        optimizer.step(found_inf=torch.tensor(value).to(device))
        pairs = zip(before, on_host(parameters), strict=True)
        left_out[str(value)] = all(torch.equal(*pair) for pair in pairs)
    return left_out


def missing_gradients():
    """Parameters without a gradient now and then keep their own step."""
    missing = {0: (1,), 2: (0, 2), 3: (3,), 5: (1, 2)}
    reports = {}
    for name, case in CASES.items():
        if "0.8" in name or name == "SGD-lr=0.1-momentum=0.5-dampening=0.1-maximize=True":
            parameters = new_parameters(torch_xla.device())
            optimizer = case.ours(parameters)
            plain_steps(parameters, optimizer, range(8), missing=missing)
            steps = [float(optimizer.state[p]["step"]) for p in parameters]
            reports[name] = {"parameters": numbers(parameters), "steps": steps, "missing": missing}
    return reports


def accumulated():
    """Four micro-batches, and the batch that they make."""
    device = torch_xla.device()
    results = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model, batch = nn.Linear(5, 3), torch.randn(16, 5)
        model = model.to(device)
        optimizer, scale, counter = Adam(model.parameters(), lr=0.1), new_scale(), Counter()
        for _ in range(4):
            optimizer.zero_grad()
            for part in batch.to(device).chunk(parts):
                scale.scale(model(part).square().mean() / parts).backward()
            scale.step(optimizer)
            scale.update()
            del part
            torch_xla.sync()
            counter.next()
        results.append({"parameters": numbers(model.parameters()), "counts": counter.steps})
    return results


def scale_alone():
    """The loss scale beside an optimizer."""
    device = torch_xla.device()
    parameters = new_parameters(device)
    optimizer = SGD(parameters, lr=0.1)
    scale = LossScale(2.0**126, growth_interval=1).to(device)
    histories = {"to the limit": []}
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        scale.step(optimizer)
        scale.update()
        histories["to the limit"].append(scale.get_scale())
    tensors = list(scale.device_tensors())
    theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=5)
    scale.load_state_dict(theirs.state_dict())
    torch_xla.sync()
    same = all(a is b for a, b in zip(tensors, scale.device_tensors(), strict=True))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    unscaled_inf = float(scale.unscale_(optimizer))
    return {
        **histories,
        "same tensors": same,
        "state": scale.state_dict(),
        "theirs": theirs.state_dict(),
        "unscaled": numbers([p.grad for p in parameters]),
        "found_inf": unscaled_inf,
    }


def two_optimizers():
    """One scale for both; first the one's gradients are not finite, then the other's."""
    device = torch_xla.device()
    sets = [new_parameters(device), new_parameters(device)]
    optimizers = [SGD(sets[0], lr=0.1), AdamW(sets[1], lr=0.1)]
    scale = new_scale()
    for step, bad in enumerate((None, (0, math.inf), (1, math.nan), None)):
        for number, (parameters, optimizer) in enumerate(zip(sets, optimizers, strict=True)):
            factors = to_device(gradients(step, bad=bad[1] if bad and bad[0] == number else None))
            optimizer.zero_grad()
            scale.scale(loss_of(parameters, factors)).backward()
            scale.step(optimizer)
        scale.update()
        del factors
        torch_xla.sync()
    return {
        "scale": scale.get_scale(),
        "steps": [float(o.state[p[0]]["step"]) for o, p in zip(optimizers, sets, strict=True)],
    }


def matrices_orthogonalized():
    """Muon on matrices and filters, here and on the host."""
    report = {}
    for name, place in (("here", torch_xla.device()), ("host", torch.device("cpu"))):
        generator = torch.Generator().manual_seed(0)
        shapes = ((6, 4), (4, 6), (3, 2, 2, 2))
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        parameters = [nn.Parameter(value.to(place)) for value in values]
        optimizer, counter = Muon(parameters, lr=0.02), Counter()
        for _ in range(4):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value.to(place)
            optimizer.step()
            torch_xla.sync()
            counter.next()
        report[name] = {"parameters": numbers(parameters), "counts": counter.steps}
    return report


def rounded():
    """Moments of eight bits here and on the host, with two bad steps."""
    report = {}
    for name, place in (("here", torch_xla.device()), ("host", torch.device("cpu"))):
        values = [torch.linspace(-1, 1, 4096).reshape(64, 64), torch.linspace(-1, 1, 5)]
        parameters = [nn.Parameter(value.to(place)) for value in values]
        optimizer, counter = AdamW8bit(parameters, lr=0.01), Counter()
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(place)
            bad = torch.tensor(1.0 if step in BAD else 0.0)
            optimizer.step(found_inf=device.upload([bad], place)[0])
            optimizer.zero_grad()
            torch_xla.sync()
            counter.next()
        state = [each for each in state_of(optimizer) if each.dtype == torch.uint8]
        report[name] = {
            "parameters": numbers(parameters),
            "codes": numbers(state),
            "counts": counter.steps,
        }
    return report


def switched():
    """Averages put into the parameters and taken out again between two steps, and what it costs."""
    parameters = new_parameters(torch_xla.device())
    optimizer, scale = ScheduleFreeAdamW(parameters, lr=0.05), new_scale()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)  # loaded after the state was made
    torch_xla.sync(wait=True)
    compiles, averages = [], []

    def after(step):
        compiles.append(count("UncachedCompile"))
        if step % 4 == 3:
            optimizer.eval()
            averages.append(numbers(parameters))
            optimizer.train()
            torch_xla.sync(wait=True)
            compiles[-1] = count("UncachedCompile")

    train(parameters, optimizer, scale, after=after)
    return {"parameters": numbers(parameters), "averages": averages, "compiles": compiles}


def refused():
    """Optimizers that work beside the steps, which torch_xla does not."""
    messages = []
    for optimizer in (Shampoo, SOAP):
        try:
            optimizer(new_parameters(torch_xla.device()))
        except ValueError as error:
            messages.append(str(error))
    return messages


CASES_BY_NAME = {
    "SGD": SGD,
    "Adam": Adam,
    "AdamW": AdamW,
    "LAMB": LAMB,
    "Lion": Lion,
    "Adafactor": Adafactor,
    "ScheduleFreeAdamW": ScheduleFreeAdamW,
}
CHECKS = (
    matrix,
    scheduled,
    clipped,
    aliases,
    aliases_of_parameters_follow,
    exchanged,
    copies,
    added_group,
    scalers,
    dtypes,
    found_inf_of_any_kind,
    missing_gradients,
    accumulated,
    scale_alone,
    two_optimizers,
    matrices_orthogonalized,
    rounded,
    switched,
    refused,
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--but", action="append", default=[])
    options = parser.parse_args()
    gc.disable()  # which tensors are alive decides what a lazy step is
    report = {"seconds": {}}
    for check in CHECKS:
        if check.__name__ in options.but or check.__name__ not in (
            options.only or [check.__name__]
        ):
            continue
        start = time.monotonic()
        report[check.__name__] = check()
        report["seconds"][check.__name__] = round(time.monotonic() - start, 1)
        gc.collect()
    options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
