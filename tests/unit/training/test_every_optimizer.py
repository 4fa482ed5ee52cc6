"""Promises of every optimizer: skipped steps change nothing, and state can be copied."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from graphstash.errors import ConfigError
from graphstash.training import (
    LAMB,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    Batches,
    Lion,
    LossScale,
    Muon,
    ScheduleFreeAdamW,
    Shampoo,
    fuse,
    muon_groups,
    train,
)
from graphstash.training.optimizers import cohort, eight_bit, muon
from support.device_reads import Reads
from support.optimizer_cases import assert_equal, copies, give_gradients, make_steps, shaped
from support.tiers import most_extended

LATER = {"precondition_frequency": 2, "delay": 1, "deterministic": True}
EVERY = {
    "SGD": partial(SGD, lr=0.1),
    "SGD with momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD by formula": partial(SGD, lr=0.1, momentum=0.9, fused=False),
    "Adam": partial(Adam, lr=0.05, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.05),
    "AdamW by formula": partial(AdamW, lr=0.05, weight_decay=0.1, fused=False),
    "LAMB": partial(LAMB, lr=0.05),
    "Lion": partial(Lion, lr=0.01),
    "Adafactor": partial(Adafactor, lr=0.1, weight_decay=0.1),
    "ScheduleFreeAdamW": partial(ScheduleFreeAdamW, lr=0.05, warmup_steps=3),
    "Muon": partial(Muon, lr=0.02),
    "Adam8bit": partial(Adam8bit, lr=0.01),
    "AdamW8bit": partial(AdamW8bit, lr=0.01),
    "Shampoo": partial(Shampoo, **LATER),
    "SOAP": partial(SOAP, **LATER),
}
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float64]
WIDTHS = [torch.float32, torch.bfloat16]
SHAPES = ((6, 4), (64, 64), (3, 2, 5, 2), (5,), ())
every_optimizer = pytest.mark.parametrize("name", EVERY)
ROOTS = {"Shampoo", "SOAP"}
FUSED = {"SGD", "SGD with momentum", "Adam", "AdamW"}
"""Optimizers whose parameters torch's kernels may update. The kernels round differently."""
WIDE = {"step", "weight_sum", "lr_max"}


def shapes_of(name):
    return SHAPES[:3] if name == "Muon" else SHAPES


def new_parameters(name, dtype=torch.float32):
    return shaped(shapes_of(name), dtype)


def made(name, dtype=torch.float32, **options):
    parameters = new_parameters(name, dtype)
    return parameters, EVERY[name](parameters, **options)


def tensors_of(parameters, optimizer):
    states = [optimizer.state[each] for each in parameters]
    kept = [state[name] for state in states for name in sorted(state)]
    return [*parameters, *(each for each in kept if isinstance(each, torch.Tensor))]


# Skipped steps.


@every_optimizer
def test_a_bad_step_changes_no_bit_and_does_not_read_the_device(name):
    parameters, optimizer = made(name)
    make_steps(parameters, optimizer, range(3))
    if hasattr(optimizer, "close"):
        optimizer.state_dict()  # waits for the roots
    before = copies(parameters)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    scale = LossScale(8.0).to("cpu")
    with Reads() as reads:
        for bad in (math.inf, -math.inf, math.nan):
            give_gradients(parameters, 1, bad=bad)
            scale.step(optimizer)
            scale.update()
    assert reads.count == 0
    assert_equal(parameters, before)
    if not hasattr(optimizer, "close"):
        torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["float32", "master"])
@every_optimizer
def test_step_after_skipped_first_steps_counts_as_first(name, options):
    dtype = torch.bfloat16 if options else torch.float32
    (ours, mine), (fresh, other) = (made(name, dtype, **options) for _ in range(2))
    for bad in (math.inf, math.nan):
        give_gradients(ours, 0, bad=bad)
        mine.step(found_inf=torch.tensor(1.0))
    assert_equal(ours, fresh)
    if not hasattr(mine, "close"):
        assert mine.state_dict()["state"] == {}
    with torch.no_grad():
        for parameter in (*ours, *fresh):
            parameter.mul_(3.0)  # as if the model had loaded other values meanwhile
    make_steps(ours, mine, range(3))
    make_steps(fresh, other, range(3))
    assert_equal(tensors_of(ours, mine), tensors_of(fresh, other))


@every_optimizer
def test_parameter_without_gradient_is_unchanged_by_step(name):
    together, alone = shaped(SHAPES[:2]), shaped(SHAPES[:2])
    mine, other = EVERY[name](together), EVERY[name](alone[:1])
    for step in range(7):
        give_gradients(together, step)
        give_gradients(alone[:1], step)
        together[1].grad = None
        if step in (2, 5):
            together[0].grad = None
        else:
            other.step()
        mine.step()
    assert_equal(together[:1], alone[:1])
    assert list(mine.state_dict()["state"]) == [0]


@every_optimizer
def test_parameters_that_share_memory_are_refused_and_do_not_change(name):
    memory = torch.randn(8, 4)
    parameters = [nn.Parameter(memory[:6]), nn.Parameter(memory[5:])]
    optimizer = EVERY[name](parameters)
    before = memory.clone()
    give_gradients(parameters, 0)

    with pytest.raises(RuntimeError, match=r"\[\[6, 4\], \[3, 4\]\] share memory"):
        optimizer.step()

    assert_equal([memory], [before])


@every_optimizer
def test_parts_of_one_tensor_are_updated_as_separate_tensors(name):
    memory = torch.randn(6, 8)
    parts = [nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])]
    alone = [nn.Parameter(each.detach().clone()) for each in parts]
    make_steps(parts, EVERY[name](parts), range(3))
    make_steps(alone, EVERY[name](alone), range(3))
    torch.testing.assert_close(parts, alone)


# State.


def loaded(parameters, optimizer, name, options):
    new = [nn.Parameter(each) for each in copies(parameters)]
    other = EVERY[name](new, **options | {"lr": 0.5})
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new, other


COPIES = {
    "deepcopy": lambda p, o, *_: copy.deepcopy((p, o)),
    "pickle": lambda p, o, *_: pickle.loads(pickle.dumps((p, o))),
    "state dictionary": loaded,
}


@pytest.mark.parametrize("how", COPIES)
@every_optimizer
def test_copy_continues_independently_to_the_bit(name, how):
    is_half = (list(EVERY).index(name) + list(COPIES).index(how)) % 2
    options = {"master_weights": True} if is_half else {}
    parameters, optimizer = made(name, torch.bfloat16 if is_half else torch.float32, **options)
    make_steps(parameters, optimizer, range(3))
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert [float(step) for step in steps] == [3.0] * len(parameters)
    # Each parameter has its own counter.
    assert len({step.data_ptr() for step in steps}) == len(parameters)
    new, copied = COPIES[how](parameters, optimizer, name, options)
    before = copies(tensors_of(parameters, optimizer))
    make_steps(new, copied, range(3, 6))
    assert_equal(tensors_of(parameters, optimizer), before)
    make_steps(parameters, optimizer, range(3, 6))
    assert_equal(tensors_of(new, copied), tensors_of(parameters, optimizer))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "SGD"])  # has only counts
def test_a_state_dictionary_that_was_not_copied_has_the_present_state(name):
    """As in torch.optim, where it contains the optimizer's own tensors."""
    parameters, optimizer = made(name)
    make_steps(parameters, optimizer, range(3))
    kept = optimizer.state_dict()
    make_steps(parameters, optimizer, range(3, 5))
    expected = copy.deepcopy(optimizer.state_dict())
    other = EVERY[name]([nn.Parameter(each) for each in copies(parameters)])
    for each in (optimizer, other):
        each.load_state_dict(kept)
        torch.testing.assert_close(
            each.state_dict()["state"], expected["state"], rtol=0, atol=0, equal_nan=True
        )


@every_optimizer
def test_state_of_other_groups_is_refused_and_changes_nothing(name):
    parameters, optimizer = made(name)
    make_steps(parameters, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    groups = [{"params": new_parameters(name)[:2]}, {"params": new_parameters(name)[2:]}]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(EVERY[name](groups).state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@every_optimizer
def test_state_tensor_of_another_shape_is_refused_and_changes_nothing(name):
    parameters, optimizer = made(name)
    make_steps(parameters, optimizer, range(3))
    if name == "ScheduleFreeAdamW":
        optimizer.eval()  # adds a tensor to the state
    saved = optimizer.state_dict()
    new = made(name)[1]
    for number, state in saved["state"].items():
        for key in state.keys() - {"step", "calls"}:
            wrong = torch.zeros(*state[key].shape, 2)
            states = saved["state"] | {number: state | {key: wrong}}
            with pytest.raises(ConfigError, match=rf"{key} has the shape \[[\d, ]+\] instead of"):
                new.load_state_dict(saved | {"state": states})
            assert new.state_dict()["state"] == {}


@every_optimizer
def test_state_without_step_is_refused_if_updates_depend_on_the_step(name):
    """torch's Adam refuses such a state. torch's SGD and Muon, and other Lions, save no step."""
    parameters, optimizer = made(name)
    make_steps(parameters, optimizer, range(3))
    saved = optimizer.state_dict()
    states = {
        number: {key: value for key, value in state.items() if key != "step"}
        for number, state in saved["state"].items()
    }
    new = made(name)[1]
    if name.startswith(("SGD", "Lion", "Muon")):
        new.load_state_dict(saved | {"state": states})
        assert all(state["step"] == 1 for state in new.state_dict()["state"].values() if state)
        return
    with pytest.raises(ConfigError, match="and no step, and the next update depends on the number"):
        new.load_state_dict(saved | {"state": states})
    assert new.state_dict()["state"] == {}


def test_state_without_step_of_a_parameter_that_muon_updates_as_adamw_is_refused():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Muon([{"params": [parameter], "use_muon": False}])
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][0]["step"]
    with pytest.raises(ConfigError, match="has exp_avg, exp_avg_sq and no step"):
        optimizer.load_state_dict(saved)


# The same bits in every way of computing.


def trained_in(name, dtype, *, found_inf=None):
    shapes = [*shapes_of(name)] * 3  # batches of equal shapes, and others in between
    parameters = shaped(shapes, dtype)
    optimizer = EVERY[name](parameters)
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step(found_inf=found_inf)
    return tensors_of(parameters, optimizer)


@pytest.mark.parametrize("dtype", most_extended(WIDTHS, quick=WIDTHS[:1]), ids=str)
@every_optimizer
def test_parts_batches_and_selection_change_no_bit(name, dtype, monkeypatch):
    expected = trained_in(name, dtype)
    if "formula" in name or name not in FUSED:
        assert_equal(trained_in(name, dtype, found_inf=torch.zeros(())), expected)
    for part_bytes in (1, 2**15):
        monkeypatch.setattr(cohort, "_PART_BYTES", part_bytes)
        assert_equal(trained_in(name, dtype), expected)
    monkeypatch.setattr(cohort, "_PART_BYTES", 2**30)
    monkeypatch.setattr(muon, "_is_batch_exact", lambda *_: False)
    assert_equal(trained_in(name, dtype), expected)


@pytest.mark.parametrize("shape", [(3, 5), (16, 16), (2, 1024), (8, 24), (40, 24)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_batches_change_no_bit_of_any_matrix(shape, is_transposed):
    iteration = ((3.4445, -4.7750, 2.0315), 5)
    generator = torch.Generator().manual_seed(7)
    for _ in range(100):
        matrices = [torch.randn(shape, generator=generator) for _ in range(3)]
        if is_transposed:
            matrices = [matrix.T for matrix in matrices]
        for numbers in muon._group_alike(matrices, iteration):
            if len(numbers) > 1:
                chosen = [matrices[number] for number in numbers]
                alone = [muon._orthogonalize(matrix, *iteration) for matrix in chosen]
                assert_equal(muon._orthogonalize_batch(chosen, *iteration).unbind(), alone)


# Types.


@pytest.mark.parametrize("dtype", most_extended(DTYPES, quick=HALVES[:1]), ids=str)
@every_optimizer
def test_low_precision_parameters_train_as_float32_and_keep_dtype(name, dtype):
    (ours, mine), (wide, other) = made(name, dtype), made(name)
    make_steps(ours, mine, range(3))
    make_steps(wide, other, range(3))
    for parameter, expected in zip(ours, wide, strict=True):
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.float(), expected, rtol=0.05, atol=0.05)
        if name not in ROOTS and "8bit" not in name:
            narrow = {each.dtype for key, each in mine.state[parameter].items() if key not in WIDE}
            assert narrow <= {dtype}


@pytest.mark.parametrize("dtype", most_extended(HALVES, quick=HALVES[:1]), ids=str)
@every_optimizer
def test_master_weights_train_as_float32_parameters(name, dtype):
    parameters, mine = made(name, dtype, master_weights=True)
    wide = [nn.Parameter(each.float()) for each in copies(parameters)]
    other = EVERY[name](wide, fused=False)
    for step in range(6):
        give_gradients(parameters, step)
        for parameter, copied in zip(parameters, wide, strict=True):
            copied.grad = parameter.grad.float()
        for each in (mine, other):
            each.step(found_inf=torch.tensor(float(step == 3)))
    assert_equal([mine.state[each]["master"] for each in parameters], wide)
    assert_equal(parameters, [each.to(dtype) for each in wide])


def trained_under(default_dtype, name):
    """Train under a default dtype. Resume after 300 steps, which bfloat16 cannot count."""
    parameters = shaped([(64, 64)])
    eight_bit._table.cache_clear()
    torch.set_default_dtype(default_dtype)
    try:
        optimizer, scale = EVERY[name](parameters), LossScale(8.0, growth_interval=2).to("cpu")
        for step in range(6):
            gradient = torch.arange(4096, dtype=torch.float32).add(step).sin().reshape(64, 64)
            parameters[0].grad = gradient * scale.value
            scale.step(optimizer)
            scale.update()
            if step == 2:
                state = optimizer.state_dict()
                state["state"][0]["step"] += 298
                optimizer = EVERY[name](parameters)
                optimizer.load_state_dict(state)
        step = optimizer.state_dict()["state"][0]["step"]
        return parameters, (step, step.dtype, scale.get_scale())
    finally:
        torch.set_default_dtype(torch.float32)
        eight_bit._table.cache_clear()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ROOTS])
def test_torchs_default_dtype_changes_no_bit(name):
    expected, _ = trained_under(torch.float32, name)
    for default_dtype in (torch.float64, torch.bfloat16):
        parameters, numbers = trained_under(default_dtype, name)
        assert_equal(parameters, expected)
        assert numbers == (304, torch.float32, 64)


def laid_out(kind):
    """Return a parameter and a gradient in an unusual layout, their values, and neighbors."""
    generator = torch.Generator().manual_seed(0)
    value, gradient = torch.randn(2, 6, 4, 4, generator=generator).unbind(0)
    parameter = whole = value.clone()
    if kind == "transposed parameter":
        parameter = value.transpose(0, 2).contiguous().transpose(0, 2)
    elif kind == "slice":
        whole = torch.zeros(6, 4, 9)
        parameter = whole[:, :, :4].copy_(value)
    elif kind == "transposed gradient":
        gradient = gradient.transpose(0, 2).contiguous().transpose(0, 2)
    elif kind == "expanded gradient":
        gradient = torch.tensor(0.5).expand(6, 4, 4)
    parameter = nn.Parameter(parameter)
    parameter.grad = gradient
    rest = whole[:, :, 4:]
    return parameter, nn.Parameter(value.clone()), gradient.clone().contiguous(), rest


LAYOUTS = ["transposed parameter", "slice", "transposed gradient", "expanded gradient"]


@every_optimizer
def test_the_layout_in_memory_changes_nothing(name):
    for layout in LAYOUTS:
        parameter, plain, gradient, rest = laid_out(layout)
        plain.grad = gradient
        first, second = EVERY[name]([parameter]), EVERY[name]([plain])
        for _ in range(3):
            first.step()
            second.step()
        torch.testing.assert_close(parameter, plain, rtol=0, atol=1e-6)
        assert not rest.any()


def mask():
    values = torch.ones(4, 5).triu() * 0.5 + 0.25
    return values.masked_fill(torch.ones(4, 5).triu(1).bool(), -math.inf)


def trained_mask(make, *, steps=3, **options):
    """Train scores with an additive mask. The scores have no gradient where the mask is -inf."""
    parameter = nn.Parameter(mask())
    optimizer = make([parameter], **options)
    for step in range(steps):
        gradient = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient.masked_fill(mask().isinf(), 0)
        optimizer.step()
    return parameter, optimizer


@every_optimizer
def test_infinity_in_a_parameter_stays_and_its_other_elements_are_trained(name):
    parameter, optimizer = trained_mask(EVERY[name], weight_decay=0.0)
    is_infinite = mask().isinf()
    for _ in range(2):
        assert torch.equal(parameter.isinf(), is_infinite)
        assert not parameter.isnan().any()
        assert (parameter != mask())[~is_infinite].all()
        if name == "ScheduleFreeAdamW":
            optimizer.eval()  # averages of infinity are infinite
    if name in {"LAMB", "Adafactor"}:
        parameter, _ = trained_mask(EVERY[name], steps=1, weight_decay=0.1)
        assert parameter[~is_infinite].isfinite().all()


# In training loops.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.hidden = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        self.head = nn.Linear(64, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def new_training(name):
    torch.manual_seed(0)
    model = Model()
    groups = model.parameters()
    if name == "Muon":
        groups = muon_groups(model, adamw=[model.head], lr=1e-2)
    return model, EVERY[name](groups)


@pytest.mark.parametrize("when", most_extended(["backward", "forward"], quick=["backward"]))
@every_optimizer
def test_fused_steps_are_equal_to_the_bit(name, when):
    results = []
    for fused in (False, True):
        model, optimizer = new_training(name)
        handle = fuse(model, optimizer, when=when) if fused else None
        for step in range(8):
            optimizer.zero_grad()
            model(torch.arange(10).roll(step)).square()[:, 1:].mean().backward()
            optimizer.step()
        if handle is not None:
            handle.close()
        results.append(tensors_of(list(model.parameters()), optimizer))
    assert_equal(*results)


@every_optimizer
def test_training_with_each_optimizer_learns_and_resumes_to_the_bit(name, tmp_path):
    tokens = torch.arange(10).repeat(4)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[0] % 3)

    def trained(steps, directory):
        model, optimizer = new_training(name)
        options = {"steps": steps, "loss": loss, "checkpoints": tmp_path / directory}
        result = train(model, optimizer, Batches((tokens,), 10), progress=False, **options)
        return result.losses, list(model.parameters())

    losses, whole = trained(16, "whole")
    first, _ = trained(7, "parts")
    rest, resumed = trained(16, "parts")
    assert first + rest == losses
    assert_equal(resumed, whole)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"lr": -1.0}, "lr must be at least 0") for name in EVERY),
        *((name, {"lr": math.nan}, "lr must be at least 0") for name in EVERY),
        *((name, {"weight_decay": math.nan}, "weight_decay must be at least 0") for name in EVERY),
        ("SGD", {"dampening": math.nan}, "dampening must be"),
        ("SGD", {"momentum": -1.0}, "momentum must be"),
        ("SGD", {"nesterov": True}, "needs"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "needs"),
        *((n, {"betas": (math.nan, 0.9)}, r"betas\[0\] must be") for n in ("Adam", "LAMB", "Lion")),
        *((n, {"betas": (0.9, 1.0)}, r"betas\[1\] must be") for n in ("AdamW", "Lion", "Muon")),
        *(("AdamW", {"betas": bad}, "betas must be 2") for bad in (0.9, (0.9,), (0.9, 0.9, 0.9))),
        *((name, {"eps": -1.0}, "eps must be") for name in ("Adam", "AdamW", "LAMB", "Shampoo")),
        *(("Adafactor", {"eps": bad}, "must be") for bad in ((-1.0, 1e-3), (None, -1.0), (None,))),
        *(("Adafactor", {"eps": bad}, "must be") for bad in ((math.nan, 1e-3), 1e-3)),
        *(("Adafactor", {"d": bad}, "d must be") for bad in (0.5, math.nan)),
        *(("Adafactor", {"beta2_decay": bad}, "beta2_decay must be") for bad in (0.1, math.nan)),
        *(("ScheduleFreeAdamW", {"betas": (bad, 0.9)}, "must be") for bad in (0.0, 1.0, math.nan)),
        *(("ScheduleFreeAdamW", {each: -1}, f"{each} must be") for each in ("warmup_steps", "r")),
        ("ScheduleFreeAdamW", {"weight_lr_power": -1}, "weight_lr_power must be"),
        *((n, {"amsgrad": True}, "use Adam or AdamW with it") for n in ("Adam8bit", "AdamW8bit")),
        ("Muon", {"momentum": 1.0}, r"momentum must be at least 0 and below 1 \(got 1.0\)"),
        ("Muon", {"momentum": math.nan}, "momentum must be at least 0"),
        ("Muon", {"ns_steps": 0}, r"a whole number from 1 to 99 \(got 0\)"),
        *(("Muon", {"ns_steps": bad}, rf"ns_steps must be .* \(got {bad}\)") for bad in (100, 5.0)),
        ("Muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be 3 numbers"),
        ("Muon", {"adjust_lr_fn": "linear"}, r"None, original or match_rms_adamw \(got linear\)"),
        ("Shampoo", {"precondition_frequency": 0}, r"a whole number and at least 1 \(got 0\)"),
        ("SOAP", {"precondition_frequency": 1.5}, r"precondition_frequency must be .* \(got 1.5\)"),
        ("SOAP", {"max_preconditioner_dim": 0}, "max_preconditioner_dim must be"),
        *(("Shampoo", {"delay": bad}, r"from 0 to precondition_frequency") for bad in (-1, 11)),
        ("SOAP", {"delay": 1.0}, "delay must be a whole number"),
        ("SOAP", {"shampoo_beta": 1.0}, r"shampoo_beta must be .* \(got 1.0\)"),
        ("Shampoo", {"eps": 0}, r"eps must be above 0 \(got 0\)"),
        *((name, {"master_weights": True}, r"bfloat16 and float16 parameters") for name in EVERY),
    ],
    ids=str,
)
def test_option_out_of_range_is_refused_for_optimizer_and_group(name, options, message):
    with pytest.raises(ValueError, match=message):
        made(name, **options)
    _, mine = made(name)
    with pytest.raises(ValueError, match=message):
        mine.add_param_group({"params": new_parameters(name), **options})
    assert len(mine.param_groups) == 1


@every_optimizer
def test_options_without_effect_are_accepted_and_unknown_ones_refused(name):
    parameters, mine = made(name, foreach=False, capturable=True, differentiable=False)
    make_steps(parameters, mine, range(1))
    with pytest.raises(ValueError, match="cannot be differentiable"):
        made(name, differentiable=True)
    with pytest.raises(ValueError, match="fused and foreach"):
        made(name, foreach=True, fused=True)
    with pytest.raises(TypeError, match="has no option fuse"):
        made(name, fuse=True)
    with pytest.raises(ValueError, match=r"no option weight_deacy \(groups have params, lr"):
        EVERY[name]([{"params": new_parameters(name), "weight_deacy": 0.0}])
    resumed = [{"params": new_parameters(name), "initial_lr": 0.1, "name": "biases"}]
    schedule = torch.optim.lr_scheduler.StepLR(EVERY[name](resumed), 2, last_epoch=4)
    assert schedule.last_epoch == 5
