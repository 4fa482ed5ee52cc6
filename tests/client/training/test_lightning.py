"""Lightning's Trainer and Fabric with graphstash's optimizers."""

import math

import pytest
import torch

from graphstash import training
from support.device_reads import Reads
from support.frameworks import Regression, batches, framework, is_same, states
from support.tiers import most_extended

BATCHES = 4

# Lightning warns of small loaders, absent loggers, and checkpoints in non-empty folders.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")


@pytest.fixture(scope="module")
def lightning():
    return framework("lightning")


@pytest.fixture(scope="module")
def modules(lightning):
    """A module with Lightning's automatic optimization, and one with manual optimization."""

    class Automatic(lightning.LightningModule):
        def __init__(self, make, when, options):
            super().__init__()
            self.model = Regression()
            self.make, self.when, self.options = make, when, options
            self.losses, self.fusion = [], None

        def training_step(self, batch, number):
            loss = self.model.loss(batch)
            self.losses.append(loss.detach())
            bad = self.options.get("bad") == number
            return loss * (math.inf if bad else 1.0)

        def configure_optimizers(self):
            self.optimizer = self.make(self.model.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
            return [self.optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_fit_start(self):
            if self.when is not None:
                self.fusion = training.fuse(self.model, self.optimizers(), self.when)

        def on_train_end(self):  # Lightning calls cpu() after this hook, which makes the updates
            if self.fusion is not None:
                self.waited = len(getattr(self.fusion, "_waiting", ()))
                self.fusion.close()

    class Manual(Automatic):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False
            self.scale = training.LossScale(8.0, enabled=self.options.get("scaled", False))

        def training_step(self, batch, number):
            optimizer = self.optimizers()
            loss = super().training_step(batch, number)
            optimizer.zero_grad()
            self.manual_backward(self.scale.scale(loss))
            self.scale.unscale_(optimizer)
            self.clip_gradients(optimizer, 0.5, "norm")
            self.scale.step(optimizer)
            self.scale.update()
            self.lr_schedulers().step()

    return Automatic, Manual


@pytest.fixture
def fit(lightning, modules, tmp_path):
    """Return a function that trains for some epochs and returns the module with its `losses`."""

    def fit(make=training.AdamW, *, when=None, manual=False, own=None, **options):
        start, save = options.pop("start", None), options.pop("save", None)
        data = batches(options.pop("batches", BATCHES))
        module = modules[manual](make, when, own or {})
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=options.pop("epochs", 2),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        trainer.fit(module, loader, ckpt_path=start)
        if save is not None:
            trainer.save_checkpoint(save)
        return module

    return fit


def ends(module):
    return states(module.model, module.optimizer)


def without_amp_scaling(*args, **options):
    return training.AdamW(*args, amp_scaling=False, **options)


SETTINGS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed", "make": without_amp_scaling, "gradient_clip_val": 0.5},
    "manual": {"manual": True},
}


@pytest.mark.parametrize("name", most_extended(list(SETTINGS), quick=["bf16"]))
def test_losses_equal_torchs_adamw_and_a_fused_forward_ends_at_the_same_bits(fit, name):
    settings = SETTINGS[name]
    ours, theirs = fit(**settings), fit(**settings | {"make": torch.optim.AdamW})
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-6)
    assert len(set(map(float, ours.losses))) == 2 * BATCHES
    rates = [module.optimizer.param_groups[0]["lr"] for module in (ours, theirs)]
    assert rates[0] == rates[1] <= 0.01 * 0.8**4

    fused = fit(when="forward", **settings)
    assert is_same(fused.losses, ours.losses)
    assert is_same(ends(fused), ends(ours))
    assert fused.waited == 6


def test_a_fused_backward_ends_at_the_same_bits(fit):
    settings = {"precision": "bf16-mixed"}
    alone, fused = fit(**settings), fit(when="backward", **settings)
    assert is_same(fused.losses, alone.losses)
    assert is_same(ends(fused), ends(alone))


@pytest.mark.parametrize("name", ["clipped", "accumulated", "manual"])
def test_backward_fusion_refuses_gradient_uses_of_lightning(fit, name):
    with pytest.raises(training.FusionError, match='use when="forward"'):
        fit(when="backward", **SETTINGS[name])


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_resumed_run_ends_at_the_same_bits(fit, when, tmp_path):
    whole = fit(when=when)
    fit(when=when, epochs=1, save=tmp_path / "last.ckpt")
    resumed = fit(when=when, start=tmp_path / "last.ckpt")
    assert is_same(resumed.losses, whole.losses[BATCHES:])
    assert is_same(ends(resumed), ends(whole))


def test_a_step_that_overflows_is_skipped_as_torchs_is(fit, lightning):
    plugin = lightning.pytorch.plugins.precision.MixedPrecision
    ends_of = {}
    for make in (training.AdamW, without_amp_scaling, torch.optim.AdamW):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        module = fit(
            make,
            when="forward" if make is not torch.optim.AdamW else None,
            own={"bad": 2},
            plugins=[plugin("16-mixed", "cpu", scaler)],
        )
        ends_of[make] = (module.model.state_dict(), scaler.get_scale())
    *ours, theirs = ends_of.values()
    for end in ours:
        torch.testing.assert_close(end, theirs)
    assert theirs[1] == 2.0  # it overflowed twice


def test_clipping_in_mixed_precision_is_refused_unless_the_optimizer_leaves_scaling_alone(fit):
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(precision="bf16-mixed", gradient_clip_val=0.5)


SILENT = {
    "automatic": {"precision": "bf16-mixed"},
    "manual": {"manual": True},
    "scaled": {"manual": True, "own": {"scaled": True, "bad": 2}},
}


@pytest.mark.parametrize(
    ("name", "when"), [("automatic", None), ("manual", "forward"), ("scaled", "forward")]
)
def test_no_step_reads_the_device(fit, name, when):
    settings = SILENT[name]
    counts = []
    for count in (BATCHES, 2 * BATCHES):
        with Reads() as reads:
            module = fit(when=when, batches=count, **settings)
        counts.append(reads.count)
    assert counts[0] == counts[1]
    if "own" in settings:
        assert float(module.scale.value) == 2.0  # it overflowed twice


class FabricLoop:
    """The loop of Fabric's documentation."""

    def __init__(self, lightning, make, when=None):
        self.fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
        model = Regression()
        optimizer = make(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.fusion = when and training.fuse(self.model, self.optimizer, when)

    def run(self, first, last):
        losses = []
        for x in batches(last)[first:]:
            self.optimizer.zero_grad()
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.fabric.backward(loss)
            if not self.fusion or self.fusion.when == "forward":
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1e6)
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_fabric_trains_as_torchs_adamw_and_resumes_to_the_bit(lightning, when, tmp_path):
    whole = FabricLoop(lightning, without_amp_scaling, when)
    losses = whole.run(0, 3)
    whole.fabric.save(tmp_path / "state", whole.state())
    losses += whole.run(3, 6)
    torch.testing.assert_close(losses, FabricLoop(lightning, torch.optim.AdamW).run(0, 6))

    resumed = FabricLoop(lightning, without_amp_scaling, when)
    resumed.fabric.load(tmp_path / "state", resumed.state())
    assert is_same(resumed.run(3, 6), losses[3:])
    pairs = [(each.model.state_dict(), each.optimizer.state_dict()) for each in (resumed, whole)]
    assert is_same(*pairs)
