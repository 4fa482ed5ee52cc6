"""Hugging Face's Trainer with graphstash's optimizers, on a GPT-2 with random weights."""

import pytest
import torch

from graphstash import training
from support.device_reads import Reads
from support.frameworks import framework, is_same, states
from support.tiers import most_extended

STEPS = 6


@pytest.fixture(scope="module")
def transformers():
    return framework("transformers")


@pytest.fixture
def trainer(transformers, tmp_path):
    """Return a function that makes a Trainer with a schedule. `make` creates the optimizer."""

    def trainer(make=None, *, name="run", factory=None, **arguments):
        torch.manual_seed(0)
        shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)  # with dropout
        model = transformers.GPT2LMHeadModel(config)
        optimizers = (None, None)
        if factory is None:
            optimizer = (make or adamw)(model)
            optimizers = (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))
        usual = {
            "output_dir": str(tmp_path / name),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        mask = torch.ones(8, dtype=torch.long)
        rows = [
            {"input_ids": row, "labels": row, "attention_mask": mask}
            for row in torch.randint(32, (16, 8))
        ]
        return transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**usual | arguments),
            train_dataset=rows,
            eval_dataset=rows[:4],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=factory,
        )

    return trainer


def adamw(model):
    return training.AdamW(model.parameters(), lr=0.01)


def torchs(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def muon(model):
    groups = training.muon_groups(model, adamw=[model.lm_head], lr=0.01)
    return training.Muon(groups, lr=0.01)


def train(trainer, when=None, **options):
    """Train with the same random numbers each time; return the losses and the final states."""
    torch.manual_seed(1)
    if when is None:
        trainer.train(**options)
    else:
        with training.fuse(trainer.model, trainer.optimizer, when):
            trainer.train(**options)
    return losses_of(trainer), states(trainer.model, trainer.optimizer)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SETTINGS = {
    "clipped in bf16": {"max_grad_norm": 0.5, "bf16": True},
    "accumulated and not clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
}


@pytest.mark.parametrize("name", most_extended(list(SETTINGS), quick=["clipped in bf16"]))
def test_losses_equal_torchs_adamw(trainer, name):
    ours, theirs = trainer(**SETTINGS[name]), trainer(torchs, **SETTINGS[name])
    losses, _ = train(ours)
    assert losses == pytest.approx(train(theirs)[0], rel=1e-4)
    assert len(set(losses)) == STEPS
    rates = [entry["learning_rate"] for entry in ours.state.log_history if "loss" in entry]
    assert rates == [pytest.approx(0.01 * 0.8**n) for n in range(STEPS)]


@pytest.mark.parametrize(
    ("make", "when"), [pytest.param(muon, None, marks=pytest.mark.extended), (adamw, "forward")]
)
def test_resumed_run_ends_at_the_same_bits(trainer, make, when):
    whole = trainer(make, save_strategy="steps", save_steps=3)
    ended = train(whole, when)
    checkpoint = f"{whole.args.output_dir}/checkpoint-3"
    resumed = train(trainer(make, name="resumed"), when, resume_from_checkpoint=checkpoint)
    assert is_same(resumed, ended)


def test_a_fused_forward_ends_at_the_same_bits(trainer):
    settings = {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.5}
    settings |= {"eval_strategy": "steps", "eval_steps": 2}
    alone, fused = trainer(**settings), trainer(**settings)
    train(alone)
    torch.manual_seed(1)
    waiting = []
    with training.fuse(fused.model, fused.optimizer, "forward") as fusion:
        fused.optimizer.register_step_post_hook(lambda *_: waiting.append(len(fusion._waiting)))
        fused.train()
    assert waiting == [0, *[28] * (STEPS - 1)]  # in the first step, fusion only observes
    curves = [
        [entry.get("loss", entry.get("eval_loss")) for entry in each.state.log_history]
        for each in (alone, fused)
    ]
    assert curves[0] == curves[1]
    assert is_same(*(states(each.model, each.optimizer) for each in (alone, fused)))


@pytest.mark.parametrize(
    ("when", "settings", "reason"),
    [
        ("backward", {"max_grad_norm": 0.5}, r'were changed .* use when="forward"'),
        ("backward", {"max_grad_norm": 0.0}, r'were changed .* use when="forward"'),
        ("backward", {"gradient_accumulation_steps": 2}, r'came twice .* use when="forward"'),
        ("forward", {"torch_compile": True}, r"compiled by torch\.compile"),
    ],
)
def test_unsupported_fusion_in_trainer_is_refused(trainer, when, settings, reason):
    if "torch_compile" in settings:
        settings = settings | {"torch_compile_backend": "aot_eager"}
    trained = trainer(**settings)
    before = states(trained.model, trained.optimizer)
    with pytest.raises(training.FusionError, match=reason):
        train(trained, when)
    assert is_same(states(trained.model, trained.optimizer), before)


def test_trainer_creates_requested_optimizer(trainer):
    ours = trainer(factory=(training.AdamW, {"lr": 0.01, "fused": False}))
    theirs = trainer(factory=(torch.optim.AdamW, {"lr": 0.01}))
    for each in (ours, theirs):
        each.args.weight_decay = 0.1
    assert train(ours)[0] == pytest.approx(train(theirs)[0], rel=1e-4)
    assert type(ours.optimizer.optimizer) is training.AdamW
    decays = [
        [group["weight_decay"] for group in each.optimizer.param_groups] for each in (ours, theirs)
    ]
    assert decays[0] == decays[1] == [0.1, 0.0]


def reads_of(trainer, when=None):
    with Reads() as reads:
        train(trainer, when)
    return reads.count


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)  # reads nothing


def test_optimizer_adds_no_device_read(trainer):
    """The model reads the attention mask once per step, and the Trainer reads when it logs."""
    settings = {"logging_steps": 100, "logging_nan_inf_filter": False}
    least = reads_of(trainer(sgd, **settings))
    assert STEPS <= least < 2 * STEPS
    tries = 2  # torch's kernels, in the first step
    for make in (adamw, muon):
        assert reads_of(trainer(make, **settings)) <= least + tries < least + STEPS
    counts = 27  # fusion reads a counter of each of 28 units at the end, for state_dict()
    assert reads_of(trainer(**settings), "forward") <= least + tries + counts
    assert reads_of(trainer(torchs, **settings)) >= least + STEPS
    assert reads_of(trainer(**settings | {"logging_nan_inf_filter": True})) >= least + STEPS
