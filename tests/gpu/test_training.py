"""On a GPU, a step never waits for the device and equals the plain loop to the bit."""

import os
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphstash.training import (
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdamW8bit,
    Batches,
    DeviceLoader,
    Lion,
    LossScale,
    Muon,
    ScheduleFreeAdamW,
    Shampoo,
    clip_grad_norm_,
    fuse,
    muon_groups,
    to_device,
    traced_step,
    train,
)
from graphstash.training.device import formula_only

pytestmark = pytest.mark.gpu

CUDA = torch.device(os.environ.get("TEST_DEVICE", "cuda"), 0)
IS_CUDA = CUDA.type == "cuda"
STEPS = 8
OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.01),
    "AdamW8bit": partial(AdamW8bit, lr=0.01),
    "Lion": partial(Lion, lr=0.01),
    "Adafactor": partial(Adafactor, lr=0.05),
    "ScheduleFreeAdamW": partial(ScheduleFreeAdamW, lr=0.05),
    "Muon": partial(Muon, lr=0.02),
    "Shampoo": partial(Shampoo, precondition_frequency=2, delay=1, deterministic=True),
    "SOAP": partial(SOAP, precondition_frequency=2, delay=1, deterministic=True),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Model(nn.Module):
    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 64))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.dropout(torch.tanh(self.hidden(x))))


def batch(number, size=16):
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(number))
    return x.to(CUDA), x[:, :4].to(CUDA)


class Training:
    def __init__(self, name, *, dropout=0.0, scaled=True):
        torch.manual_seed(0)
        self.model = Model(dropout=dropout).to(CUDA)
        groups = self.model.parameters()
        if name == "Muon":
            groups = muon_groups(self.model, adamw=[self.model.head])
        self.optimizer = OPTIMIZERS[name](groups)
        self.scale = LossScale(256.0, growth_interval=3).to(CUDA) if scaled else None
        self.factor = 1.0

    def step(self, x, y):
        loss = functional.mse_loss(self.model(x), y) * self.factor
        if self.scale is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scale.scale(loss).backward()
            self.scale.step(self.optimizer)
            self.scale.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @property
    def parts(self):
        return [part for part in (self.model, self.optimizer, self.scale) if part is not None]

    def tensors(self):
        saved = self.optimizer.state_dict()["state"]
        states = [saved[number] for number in sorted(saved)]
        kept = [state[name] for state in states for name in sorted(state)]
        own = [each.detach() for each in self.model.parameters()]
        return [each.cpu() for each in [*own, *kept] if isinstance(each, torch.Tensor)]


@contextmanager
def without_waits():
    """Let CUDA raise an error if the host waits for the device."""
    if not IS_CUDA:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_formula(function, *arguments):
    token = formula_only.set(True)
    try:
        return function(*arguments)
    finally:
        formula_only.reset(token)


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# Shampoo's and SOAP's threads wait for the device, and CUDA's check covers every thread.
@pytest.mark.parametrize("name", [each for each in OPTIMIZERS if each not in {"Shampoo", "SOAP"}])
def test_step_never_waits_for_the_device(name):
    training = Training(name)
    for number in range(4):  # kernels are checked, state is created, roots are computed
        training.step(*batch(number))
    batches = [batch(number) for number in range(4, 8)]
    with without_waits():
        for each in batches:
            training.step(*each)


@every_optimizer
def test_step_on_gpu_is_near_that_on_cpu(name):
    gpu, cpu = Training(name, scaled=False), Training(name, scaled=False)
    cpu.model.cpu()
    for number in range(4):
        gpu.step(*batch(number))
        cpu.step(*(each.cpu() for each in batch(number)))
    ours = [each.cpu() for each in gpu.model.parameters()]
    torch.testing.assert_close(ours, [*cpu.model.parameters()], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_kernel_follows_the_formula(name):
    kernel, formula = Training(name), Training(name)
    for number in range(STEPS):
        kernel.step(*batch(number))
        by_formula(formula.step, *batch(number))
    torch.testing.assert_close(kernel.tensors(), formula.tensors(), rtol=1e-4, atol=1e-6)


@every_optimizer
def test_step_that_overflows_changes_nothing(name):
    training = Training(name)
    for number in range(3):
        training.step(*batch(number))
    before = [each.detach().clone() for each in training.model.parameters()]
    x, y = batch(3)
    x[0, 0] = float("inf")
    training.step(x, y)
    assert_same([*training.model.parameters()], before)


# Graphs.


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW8bit", "Lion", "Adafactor", "Muon"])
def test_captured_step_has_the_bits_of_the_function(name):
    plain, traced = Training(name), Training(name)
    step = traced_step(traced.step, traced.parts)
    for number in range(STEPS):
        size = 16 if number < 6 or number % 2 else 12
        loss = by_formula(plain.step, *batch(number, size))
        assert_same(step(*batch(number, size)), loss)
        if number in (2, 5):
            for each in (plain, traced):
                each.optimizer.param_groups[0]["lr"] *= 0.5
    assert (step.mode, step.reason) == ("traced", None)
    assert_same(traced.tensors(), plain.tensors())


def test_captured_dropout_draws_as_the_function_does():
    plain, traced = Training("AdamW", dropout=0.5), Training("AdamW", dropout=0.5)
    torch.manual_seed(7)
    expected = [by_formula(plain.step, *batch(0)) for _ in range(STEPS)]
    torch.manual_seed(7)
    step = traced_step(traced.step, traced.parts)
    found = [step(*batch(0)) for _ in range(STEPS)]
    assert step.mode == "traced"
    assert len({float(each) for each in found}) == STEPS
    assert_same(found, expected)


def test_step_that_reads_the_device_is_refused_with_its_cause():
    plain, traced = Training("AdamW"), Training("AdamW")

    def reading(x, y):
        loss = traced.step(x, y)
        loss.item()
        return loss

    step = traced_step(reading, traced.parts)
    for number in range(STEPS):
        assert_same(step(*batch(number)), by_formula(plain.step, *batch(number)))
    assert step.mode == "lazy"
    assert "capturing" in step.reason
    assert_same(traced.tensors(), plain.tensors())


def test_failed_capture_leaves_stream_generator_and_memory_as_they_were():
    training = Training("AdamW", dropout=0.5)

    def reading(x, y):
        loss = training.step(x, y)
        loss.item()
        return loss

    step = traced_step(reading, training.parts)
    stream = torch.cuda.current_stream(CUDA)
    for number in range(STEPS):
        step(*batch(number, 4096))
        kept = torch.ones(1 << 20, device=CUDA)
        kept.record_stream(torch.cuda.Stream(CUDA))
        del kept
    assert step.mode == "lazy"
    assert torch.cuda.current_stream(CUDA) == stream
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # raises an error while torch counts the capture
    assert torch.cuda.memory_reserved() < 2 * torch.cuda.memory_allocated() + (64 << 20)


def test_evaluation_that_draws_on_the_device_does_not_change_the_training():
    losses = []
    for evaluate in (None, lambda _: {"drawn": float(torch.rand((), device=CUDA))}):
        torch.manual_seed(0)
        model = Model(dropout=0.5).to(CUDA)
        x = torch.randn(160, 32, generator=torch.Generator().manual_seed(0))
        options = {"evaluate": evaluate, "evaluate_every": 4 if evaluate else None}
        result = train(
            *(model, AdamW(model.parameters(), lr=0.01), Batches((x, x[:, :4]), 16)),
            loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
            steps=12,
            progress=False,
            **options,
        )
        losses.append(result.losses)
    assert losses[0] == losses[1]


def test_graph_that_keeps_a_number_which_changes_is_refused():
    plain, traced = Training("AdamW"), Training("AdamW")

    def counting(training):
        def step(x, y):
            training.factor *= 1.01
            return training.step(x, y)

        return step

    function, step = counting(plain), traced_step(counting(traced), traced.parts)
    for number in range(STEPS):
        assert_same(step(*batch(number)), by_formula(function, *batch(number)))
    assert step.mode == "lazy"
    assert "computes other values than the function for" in step.reason
    assert_same(traced.tensors(), plain.tensors())


def test_graph_whose_kernels_add_in_random_order_is_accepted():
    weight = nn.Parameter(torch.zeros(8, device=CUDA))
    optimizer = SGD([weight], lr=0.1)
    places = torch.randint(0, 8, (1 << 20,), device=CUDA)

    def function(values):
        sums = torch.zeros(8, device=CUDA).index_add(0, places, values) / 1e5
        (weight * sums).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sums

    step = traced_step(function, [weight, optimizer])
    values = torch.randn(1 << 20, device=CUDA)
    for _ in range(STEPS):
        step(values)
    assert (step.mode, step.reason) == ("traced", None)


def test_captures_of_several_structures_share_their_memory():
    training = Training("AdamW")
    step = traced_step(training.step, training.parts)
    for number in range(4):
        step(*batch(number, 4096))
    one = torch.cuda.memory_reserved()
    for size in (4095, 4094, 4093):
        for number in range(4):
            step(*batch(number, size))
    assert step.mode == "traced"
    assert torch.cuda.memory_reserved() < 1.5 * one


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_with_graph_equals_train_without(precision, tmp_path):
    results = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = Model(dropout=0.1).to(CUDA)
        optimizer = AdamW(model.parameters(), lr=0.01, fused=False)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=24)
        x = torch.randn(160, 32, generator=torch.Generator().manual_seed(0))
        options = {"steps": 24, "precision": precision, "schedule": schedule, "clip_norm": 1.0}
        options |= {"checkpoints": tmp_path / str(traced), "log_every": 6, "progress": False}
        result = train(
            *(model, optimizer, Batches((x, x[:, :4]), 16)),
            loss=lambda model, batch: functional.mse_loss(model(batch[0]).float(), batch[1]),
            traced=traced,
            **options,
        )
        results.append((result.losses, [each.detach().cpu() for each in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


# Loops.


@pytest.mark.parametrize("when", ["backward", "forward"])
@every_optimizer
def test_fused_steps_have_the_bits_of_the_loop(name, when):
    results = []
    for fused in (False, True):
        training = Training(name, scaled=False)
        handle = fuse(training.model, training.optimizer, when=when) if fused else None
        for number in range(STEPS):
            training.step(*batch(number))
        if handle is not None:
            handle.close()
        results.append(training.tensors())
    assert_same(*results)


def test_loader_uploads_whole_batches_while_the_device_is_busy():
    source = [torch.full((1 << 20,), float(number)) for number in range(24)]
    busy = torch.randn(4096, 4096, device=CUDA)
    stream = torch.cuda.Stream(CUDA) if IS_CUDA else None
    with (
        torch.cuda.stream(stream) if IS_CUDA else nullcontext(),
        DeviceLoader(source, upload=lambda each: to_device(each, CUDA)) as loader,
    ):
        sums = []
        for each in loader:
            busy = torch.tanh(busy @ busy)
            sums.append(each.sum())
            del each
    if IS_CUDA:
        stream.synchronize()
    assert [float(each) for each in sums] == [float(n << 20) for n in range(24)]


def test_norm_is_clipped_without_a_wait():
    training = Training("AdamW", scaled=False)
    functional.mse_loss(training.model(batch(0)[0]), batch(0)[1]).backward()
    parameters = [*training.model.parameters()]
    gradients = [each.grad.clone() for each in parameters]
    with without_waits():
        norm = clip_grad_norm_(parameters, 0.01)
    expected = torch.cat([each.reshape(-1) for each in gradients]).norm()
    torch.testing.assert_close(norm, expected)
