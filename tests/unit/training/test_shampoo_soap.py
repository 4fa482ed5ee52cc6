"""Shampoo, SOAP and their thread. test_every_optimizer.py tests the common promises."""

import copy
import gc
import io
import logging
import math
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import distributed, nn

from graphstash.training import SOAP, Shampoo, traced_step
from graphstash.training.optimizers import background
from graphstash.training.optimizers.background import Pending, Roots
from support.device_reads import Reads
from support.optimizer_cases import assert_close, assert_equal, give_gradients, public, shaped
from support.processes import python

BOTH = [Shampoo, SOAP]
MATRICES = ((6, 4), (4, 6), (5, 5), (3, 2, 2, 2))
SHAPES = (*MATRICES, (5,))
BAD = {0: math.inf, 5: math.nan, 11: -math.inf}
STEPS = 20


def run(parameters, optimizer, steps, *, bad=None, after=lambda step: None):
    for step in steps:
        give_gradients(parameters, step, bad=(bad or {}).get(step))
        optimizer.step(found_inf=torch.tensor(float(step in (bad or {}))))
        after(step)


def compare(make, make_reference, *, shapes=SHAPES, dtype=torch.float32, bad=BAD, refresh=None):
    """Train both optimizers; the reference skips the bad steps.

    `refresh(reference, is_due)` tells the reference whether ours computes roots in this call. Bad
    steps count for that schedule.
    """
    ours, theirs = shaped(shapes, dtype), shaped(shapes, dtype)
    optimizer, reference = make(ours), make_reference(theirs)
    with Reads() as reads:
        run(ours, optimizer, range(STEPS), bad=bad)
    assert reads.count == 0
    since_first = -1
    for step in range(STEPS):
        if since_first >= 0 or step not in bad:
            since_first += 1
        if step not in bad:
            give_gradients(theirs, step)
            if refresh is not None:
                refresh(reference, since_first)
            reference.step()
    assert_close(ours, theirs)
    assert not any(map(torch.equal, ours, shaped(shapes, dtype)))


# The formulas.

SOAP_OPTIONS = [
    {},
    {"max": 5},
    {"merge_dims": True, "max": 6, "shapes": ((6, 5), (5, 6), (3, 2, 2, 4))},
    {"shampoo_beta": 0.8, "betas": (0.8, 0.9), "weight_decay": 0.1},
    {"maximize": True},
]


@pytest.mark.parametrize(("number", "delay"), [(0, 0), (0, 1), (1, 1), (2, 0), (3, 1), (4, 0)])
def test_soap_equals_public_implementation_with_skipped_steps(number, delay):
    options = dict(SOAP_OPTIONS[number])
    largest, shapes = options.pop("max", 10_000), options.pop("shapes", SHAPES)
    options |= {"lr": 0.01, "precondition_frequency": 1}
    compare(
        lambda p: SOAP(p, delay=delay, max_preconditioner_dim=largest, **options),
        lambda p: public().SOAP(p, max_precondition_dim=largest, **options),
        shapes=shapes,
    )


@pytest.mark.parametrize("frequency", [3, 7])
def test_soap_counts_skipped_calls_between_two_bases(frequency):
    def refresh(reference, since_first):
        for state in reference.state.values():
            state["precondition_frequency"] = 1 if since_first % frequency == 0 else 10**6

    compare(lambda p: SOAP(p, precondition_frequency=frequency), public().SOAP, refresh=refresh)


def test_soap_rotates_vectors_if_enabled():
    options = {"precondition_frequency": 7, "precondition_1d": True}
    compare(
        lambda p: SOAP(p, **options),
        lambda p: public().SOAP(p, **options),
        shapes=(*MATRICES, (5,), (3,)),
        bad={},
    )


@pytest.mark.parametrize(("frequency", "dtype"), [(1, torch.float32), (3, torch.float64)])
def test_shampoo_equals_public_implementation_with_skipped_steps(frequency, dtype):
    def refresh(reference, since_first):
        for group in reference.param_groups:
            group["step"] = frequency - 1 if since_first % frequency == 0 else frequency

    compare(
        lambda p: Shampoo(
            p,
            betas=(0, 1),
            eps=1e-3,
            graft=False,
            merge_dims=False,
            precondition_1d=True,
            precondition_frequency=frequency,
            delay=0,
        ),
        lambda p: public().Shampoo(
            p, lr=0.01, matrix_eps=1e-3, preconditioning_compute_steps=frequency
        ),
        refresh=refresh if frequency > 1 else None,
        dtype=dtype,
    )


# The public implementation merges differently if the first dimension exceeds a block.
SCALABLE_OPTIONS = [
    {"merge_dims": False, "block": 3},
    {"merge_dims": False, "block": 3, "graft": False},
    {"merge_dims": False, "block": 512, "nesterov": False},
    {"merge_dims": True, "block": 4, "shapes": ((4, 6), (3, 2, 2, 2), (2, 2, 7))},
    {"merge_dims": False, "block": 4, "maximize": True, "betas": (0.5, 0.9)},
]


@pytest.mark.parametrize("number", range(len(SCALABLE_OPTIONS)))
def test_shampoo_with_blocks_equals_public_implementation(number):
    """In float64, because the reference does not limit the roots of singular matrices."""
    options = {"betas": (0.9, 0.99), "weight_decay": 0.1, **SCALABLE_OPTIONS[number]}
    block, shapes = options.pop("block"), options.pop("shapes", SHAPES)
    graft, merges = options.pop("graft", True), options.pop("merge_dims")
    compare(
        lambda p: Shampoo(
            p,
            eps=1e-12,
            graft=graft,
            merge_dims=merges,
            max_preconditioner_dim=block,
            precondition_frequency=1,
            delay=0,
            **options,
        ),
        lambda p: public().ScalableShampoo(
            p,
            lr=0.01,
            matrix_eps=1e-12,
            graft_type=int(graft),
            shape_interpretation=merges,
            block_size=block,
            use_svd=True,
            decoupled_weight_decay=True,
            start_preconditioning_step=1,
            preconditioning_compute_steps=1,
            **options,
        ),
        shapes=shapes,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("optimizer", BOTH)
def test_empty_and_zero_parameters_stay_finite(optimizer):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 3), (2, 3), (), (1,))]
    mine = optimizer(parameters, precondition_frequency=1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        mine.step()
    assert all(torch.equal(p, torch.zeros_like(p)) for p in parameters)
    assert mine.failed_roots == 0


# Delay of the roots.


def roots_after_each_call(optimizer, **options):
    parameters = shaped(MATRICES[:2])
    mine = optimizer(parameters, **options)
    history = []
    run(
        parameters,
        mine,
        range(16),
        after=lambda _: history.append(mine.state[parameters[1]]["roots"].clone()),
    )
    return history


@pytest.mark.parametrize("delay", [1, 4])
def test_deterministic_roots_are_used_exactly_after_the_delay(delay):
    """Shampoo's roots depend only on gradients, so a delay shifts them without changing them."""
    at_once = roots_after_each_call(Shampoo, precondition_frequency=4, delay=0)
    later = roots_after_each_call(
        Shampoo, precondition_frequency=4, delay=delay, deterministic=True
    )
    assert_equal(later[:4], at_once[:1] * 4)  # the first call waits for its roots
    for call in range(4, 16 - delay):
        assert torch.equal(later[call + delay], at_once[call])
    assert not torch.equal(at_once[4], at_once[3])


class Gate:
    """Block computations until the gate opens. The first computation of each parameter passes."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.finite = background._compute_finite
        monkeypatch.setattr(background, "_compute_finite", self)

    def __call__(self, compute, snapshot):
        if not snapshot.is_first:
            self.opened.wait()
        return self.finite(compute, snapshot)


def test_training_continues_without_roots_and_waits_when_they_are_due(monkeypatch):
    gate = Gate(monkeypatch)
    waits = []

    def roots(pending, original=Pending.roots):
        waits.append(gate.opened.is_set())
        gate.opened.set()
        return original(pending)

    parameters = shaped(MATRICES[:2])
    mine = Shampoo(parameters, precondition_frequency=4, delay=3)
    history = []

    def look(_):
        history.append(mine.state[parameters[1]]["roots"].clone())

    run(parameters, mine, [0], after=look)
    monkeypatch.setattr(Pending, "roots", roots)
    run(parameters, mine, range(1, 7), after=look)  # begun in call 4; would hang if a step waited
    assert waits == []
    assert torch.equal(history[6], history[0])
    run(parameters, mine, [7], after=look)
    assert waits == [False, True]  # for the first parameter's roots, then for the second's
    monkeypatch.undo()
    at_once = roots_after_each_call(Shampoo, precondition_frequency=4, delay=0)
    assert torch.equal(history[7], at_once[4])


def test_computation_reads_state_of_its_own_step(monkeypatch):
    gate = Gate(monkeypatch)
    parameters, found_inf = shaped(MATRICES[1:2]), torch.tensor(0.0)
    mine = SOAP(parameters, precondition_frequency=4, delay=4, deterministic=True)
    state = mine.state[parameters[0]]
    for step in range(8):
        give_gradients(parameters, step)
        found_inf.fill_(float(step > 5))
        mine.step(found_inf=found_inf)
        if step == 4:
            statistics, basis = state["statistics"].clone(), state["roots"].clone()
            pending = state["pending"]
    gate.opened.set()
    roots = pending.roots()
    power = statistics[:16].view(4, 4) @ basis[:16].view(4, 4)
    expected = torch.linalg.qr(power[:, roots.order[:4]]).Q
    torch.testing.assert_close(roots.flat[:16].view(4, 4), expected)


def test_each_parameter_has_one_pending_computation():
    parameters = shaped(MATRICES[:1])
    mine = Shampoo(parameters, precondition_frequency=4, delay=4, deterministic=True)
    run(parameters, mine, range(5))
    pending = mine.state[parameters[0]]["pending"]
    mine.param_groups[0]["precondition_frequency"] = 1
    run(parameters, mine, range(5, 8))
    assert mine.state[parameters[0]]["pending"] is pending
    run(parameters, mine, [8])
    assert mine.state[parameters[0]]["pending"] is not pending


def takes_roots_early(*, deterministic):
    parameters = shaped(MATRICES[:1])
    mine = Shampoo(parameters, precondition_frequency=4, delay=4, deterministic=deterministic)
    run(parameters, mine, range(5))
    state = mine.state[parameters[0]]
    before = state["roots"].clone()
    state["pending"].roots()  # waits
    run(parameters, mine, [5])
    return not torch.equal(before, state["roots"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_early_roots_are_used_unless_deterministic(deterministic):
    assert takes_roots_early(deterministic=deterministic) is not deterministic


def test_roots_are_never_used_early_with_several_processes():
    """Otherwise the processes' parameters would diverge."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", world_size=2, rank=0, store=FakeStore())
    try:
        assert not takes_roots_early(deterministic=False)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("delay", [0, 1])
def test_skipped_step_starts_no_computation(monkeypatch, delay):
    seen, finite = [], background._compute_finite

    def watched(compute, snapshot):
        seen.append(finite(compute, snapshot))
        return seen[-1]

    monkeypatch.setattr(background, "_compute_finite", watched)
    parameters = shaped(MATRICES[:1])
    mine = SOAP(parameters, precondition_frequency=1, delay=delay)
    run(parameters, mine, range(4), bad={0: math.inf, 2: math.nan})
    mine.close()
    assert [roots.flat is not None for roots in seen] == [False, True, False, True]
    assert mine.failed_roots == 0


# Failures.


@pytest.mark.parametrize("optimizer", BOTH)
@pytest.mark.parametrize("kind", ["raised", "not finite"])
def test_failed_roots_are_counted_and_old_ones_stay(optimizer, kind, monkeypatch, caplog):
    parameters = shaped(MATRICES[:1])
    mine = optimizer(parameters, precondition_frequency=1, delay=1)
    run(parameters, mine, range(3))
    mine.state_dict()  # waits
    run(parameters, mine, [3])
    mine.state[parameters[0]]["pending"].roots()

    def fails(_, snapshot):
        if kind == "raised":
            raise torch.linalg.LinAlgError("no convergence")
        return Roots(torch.full_like(snapshot.roots, math.nan))

    monkeypatch.setattr(optimizer, "_compute", lambda *_: partial(fails, None))
    run(parameters, mine, [4])
    before = mine.state[parameters[0]]["roots"].clone()
    with caplog.at_level(logging.WARNING, "graphstash"):
        run(parameters, mine, range(5, 8))
    assert torch.equal(mine.state[parameters[0]]["roots"], before)
    assert mine.failed_roots == 3
    assert [r.getMessage() for r in caplog.records if "shape [6, 4]" in r.getMessage()]
    assert len(caplog.records) == 1
    monkeypatch.undo()
    run(parameters, mine, range(8, 11))
    assert not torch.equal(mine.state[parameters[0]]["roots"], before)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_an_error_in_the_thread_is_raised_by_the_step_that_waits_for_it(delay, monkeypatch):
    parameters = shaped(MATRICES[:1])
    mine = Shampoo(parameters, precondition_frequency=2, delay=delay, deterministic=True)
    run(parameters, mine, range(2))

    def fails(_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Shampoo, "_compute", lambda *_: fails)
    run(parameters, mine, range(2, 2 + delay))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(parameters, mine, [2 + delay])
    monkeypatch.undo()
    run(parameters, mine, range(3, 9))
    mine.close()


# State.


def continued(parameters, mine, how):
    if how == "copied":
        return copy.deepcopy((parameters, mine))
    if how == "pickled":
        return pickle.loads(pickle.dumps((parameters, mine)))
    saved = {"parameters": parameters, "optimizer": mine.state_dict()}
    if how == "saved":
        file = io.BytesIO()
        torch.save(saved, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    new = [nn.Parameter(p.detach().clone()) for p in saved["parameters"]]
    other = type(mine)(new, lr=0.5)
    other.load_state_dict(saved["optimizer"])
    return new, other


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("optimizer", "dtype", "delay", "how"),
    [
        *((Shampoo, torch.float32, 3, "saved"), (Shampoo, BF16, 1, "given")),
        *((Shampoo, torch.float32, 1, "copied"), (Shampoo, BF16, 0, "pickled")),
        *((SOAP, BF16, 3, "saved"), (SOAP, torch.float32, 0, "given")),
        *((SOAP, BF16, 3, "copied"), (SOAP, torch.float32, 1, "pickled")),
    ],
)
def test_resumed_run_is_equal_to_the_bit_from_any_step(optimizer, dtype, delay, how):
    options = {"precondition_frequency": 3, "delay": delay, "deterministic": True}
    parameters = shaped(SHAPES, dtype)
    mine = optimizer(parameters, **options)
    others = []
    for step in range(8):
        run(parameters, mine, [step], bad={0: math.inf, 5: math.nan})
        for new, other in others:
            run(new, other, [step], bad={0: math.inf, 5: math.nan})
        others.append(continued(parameters, mine, how))
    for new, other in others:
        assert_equal(new, parameters)
        for one, another in zip(parameters, new, strict=True):
            for name in ("statistics", "roots"):
                kept, its = mine.state[one][name], other.state[another][name]
                assert torch.equal(kept, its)
                assert kept.data_ptr() != its.data_ptr() or not kept.numel()


@pytest.mark.parametrize("optimizer", BOTH)
def test_memory_layout_of_gradient_changes_no_bit(optimizer):
    """DistributedDataParallel's buckets place a gradient at any offset."""
    results = []
    for offset in (0, 3):
        parameters = shaped([(64, 64), (3, 64)])
        mine = optimizer(parameters, lr=0.01, deterministic=True)
        for step in range(9):
            give_gradients(parameters, step)
            for parameter in parameters:
                bucket = torch.zeros(parameter.numel() + offset)
                gradient = bucket[offset:].view_as(parameter).copy_(parameter.grad)
                parameter.grad = gradient
            mine.step()
        results.append(parameters)
    assert_equal(*results)


@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "nested"])
@pytest.mark.parametrize("optimizer", BOTH)
def test_a_distributed_checkpoint_has_the_roots_that_a_parameter_waits_for(
    optimizer, is_flat, tmp_path
):
    from support import distributed_checkpoint

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Conv2d(2, 3, 2))
        return model, optimizer(
            model.parameters(), precondition_frequency=3, delay=2, deterministic=True
        )

    model, mine = new()
    run(list(model.parameters()), mine, range(5))
    assert mine.state[model[0].weight]["pending"] is not None
    distributed_checkpoint.save(model, mine, tmp_path, is_flat=is_flat)
    other, its = new()
    distributed_checkpoint.load(other, its, tmp_path, is_flat=is_flat)
    for each, of_it in ((model, mine), (other, its)):
        run(list(each.parameters()), of_it, range(5, 11))
    assert_equal(list(other.parameters()), list(model.parameters()))


def test_loading_state_drops_pending_computations(monkeypatch):
    gate = Gate(monkeypatch)
    parameters = shaped(MATRICES[:1])
    mine = Shampoo(parameters, precondition_frequency=2, delay=2)
    run(parameters, mine, range(1))
    saved = copy.deepcopy(mine.state_dict())
    run(parameters, mine, range(1, 3))
    assert mine.state[parameters[0]]["pending"] is not None
    mine.load_state_dict(saved)
    assert mine.state[parameters[0]]["pending"] is None
    gate.opened.set()
    mine.close()


# The thread.


def root_threads():
    return [t for t in threading.enumerate() if t.name.startswith("roots")]


@pytest.mark.parametrize("how", ["closed", "collected"])
def test_the_thread_ends_with_close_or_with_the_optimizer(how):
    before = root_threads()
    parameters = shaped(MATRICES[:1])
    mine = SOAP(parameters)
    run(parameters, mine, range(2))
    (thread,) = [t for t in root_threads() if t not in before]
    if how == "closed":
        mine.close()
        mine.close()
    else:
        del mine
        gc.collect()
        thread.join()
    assert not thread.is_alive()


def test_a_step_after_close_starts_another_thread():
    results = []
    for closes in (False, True):
        parameters = shaped(SHAPES)
        mine = SOAP(parameters, precondition_frequency=2)
        for step in range(8):
            run(parameters, mine, [step])
            if closes:
                mine.close()
        results.append(parameters)
    assert_equal(*results)


@pytest.mark.extended  # starts a process that imports torch
def test_a_forked_process_computes_for_itself_and_a_process_ends_while_its_thread_computes():
    script = """
import os, sys, threading, torch
from torch import nn
from graphstash.training import Shampoo
from graphstash.training.optimizers import background

torch.set_num_threads(1)
gate, began, finite = threading.Event(), threading.Event(), background._compute_finite

def gated(compute, snapshot):
    if not snapshot.is_first:
        began.set()
        gate.wait()
    return finite(compute, snapshot)

background._compute_finite = gated
parameter = nn.Parameter(torch.ones(4, 3))
optimizer = Shampoo([parameter], precondition_frequency=2, delay=2, deterministic=True)

def run(steps):
    for step in steps:
        parameter.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.step()

run(range(3))
began.wait()
child = os.fork()
gate.set()
run(range(3, 8))
if child == 0:
    print("child", parameter.tolist(), flush=True)
    optimizer.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print("parent", parameter.tolist(), flush=True)
optimizer.state_dict()
gate.clear()
began.clear()
run([8])
began.wait()
threading._register_atexit(gate.set)  # called before the interpreter waits for threads
print("end", optimizer.state[parameter]["pending"] is not None, flush=True)
"""
    done = python(script, check=True, PYTHONWARNINGS="error")
    results = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert results.keys() == {"child", "parent", "end"}
    assert results["child"] == results["parent"]
    assert results["end"] == "True"
    assert done.stderr == ""


# Training loops.


@pytest.mark.parametrize("optimizer", BOTH)
def test_traced_step_runs_untraced_with_reason(optimizer, caplog):
    results = []
    for is_traced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        mine = optimizer(model.parameters(), precondition_frequency=2)

        def step(x, model=model, mine=mine):
            mine.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            mine.step()
            return loss

        with caplog.at_level(logging.WARNING, "graphstash"):
            function = traced_step(step, [model, mine]) if is_traced else step
        for number in range(6):
            function(torch.full((5, 4), number / 5))
        results.append(list(model.parameters()))
    assert_equal(*results)
    assert function.mode == "lazy"
    assert f"{optimizer.__name__} computes a part of its steps on the host" in function.reason
