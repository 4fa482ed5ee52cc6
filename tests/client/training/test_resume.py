"""A run that stops, fails or is killed continues as if it had not been interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from graphstash import ConfigError, training
from graphstash.training.checkpoints import CheckpointError
from support.host import file_size_limit
from support.jobs import TRAIN_JOB, losses_of, until_step
from support.small_training import Seen, mse, problem, run
from support.waiting import until

STEPS = 40


def test_callback_can_stop_training_with_resumable_checkpoint(tmp_path):
    class Enough(training.Callback):
        def on_log(self, entry):
            if entry.step == 6:
                raise training.StopTraining

    first, _ = run(20, log_every=3, checkpoints=tmp_path, callbacks=[Enough()])
    assert (first.step, first.stopped_by) == (6, "callback")
    whole, _ = run(20, log_every=3)
    of = (*problem(seed=9)[:2], problem()[2])
    rest, _ = run(20, of=of, log_every=3, checkpoints=tmp_path)
    assert rest.resumed_from == 6
    assert first.losses + rest.losses == whole.losses
    again, _ = run(20, checkpoints=tmp_path)
    assert (again.step, again.losses, again.resumed_from) == (20, (), 20)


@pytest.mark.parametrize("ahead", [0, 2])
def test_callback_can_stop_training_between_boundaries(tmp_path, ahead):
    class Enough(training.Callback):
        def on_step(self, step):
            if step == 4:
                raise training.StopTraining

    stopped, _ = run(20, ahead=ahead, callbacks=[Enough()])
    assert (stopped.step, stopped.stopped_by) == (4, "callback")
    first, _ = run(20, ahead=ahead, checkpoints=tmp_path, callbacks=[Enough()])
    assert 4 <= first.step <= 4 + ahead + 1  # one more batch may be loading
    assert first.stopped_by == "callback"
    rest, _ = run(20, ahead=ahead, checkpoints=tmp_path)
    assert rest.resumed_from == first.step
    assert first.losses + rest.losses == run(20)[0].losses


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (training.AdamW, {}, "optimizer='SGD', but this run has 'AdamW'"),
        (training.SGD, {"accumulate": 2}, "accumulate=1, but this run has 2"),
        (training.SGD, {"loss_scale": training.LossScale()}, "loss_scale=None, but this run has"),
    ],
)
def test_run_with_other_options_does_not_resume_checkpoint(tmp_path, optimizer, options, message):
    run(5, checkpoints=tmp_path)
    model, _, data = problem()
    of = (model, optimizer(model.parameters()), data)
    with pytest.raises(ConfigError, match=message):
        run(9, of=of, checkpoints=tmp_path, **options)


def test_averaged_parameters_are_updated_every_step_and_saved(tmp_path):
    def trained(steps, directory, seed=0):
        model, optimizer, _ = problem(seed=seed)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        steps_seen = []

        class Average(training.Callback):
            def on_step(self, step):
                steps_seen.append(step)
                averaged.update_parameters(model)

        options = {"checkpoints": directory, "stateful": {"ema": averaged}}
        run(steps, of=(model, optimizer, problem()[2]), callbacks=[Average()], **options)
        return steps_seen, [p.tolist() for p in averaged.parameters()]

    steps, whole = trained(8, tmp_path / "whole")
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    trained(3, tmp_path / "parts")
    steps, resumed = trained(8, tmp_path / "parts", seed=5)
    assert steps == [4, 5, 6, 7, 8]
    assert resumed == whole
    with pytest.raises(ConfigError, match=r"stateful=\['ema'\], but this run has \[\]"):
        run(9, checkpoints=tmp_path / "whole")


def test_generators_of_the_model_the_loss_and_the_dataset_resume(tmp_path):
    class Noisy(nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.noise = torch.Generator().manual_seed(3)

        def forward(self, x):
            return super().forward(x) + torch.rand(1, generator=self.noise)

    def losses_of(steps, **options):
        dataset, weights, model = Broken(), random.Random(4), Noisy()
        dataset.broken, dataset.jitter = False, random.Random(5)
        of = (model, training.SGD(model.parameters(), lr=0.1), training.Batches(dataset, 4))
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)

        def loss(model, batch):
            return mse(model, batch) * weights.random()

        return run(steps, of=of, loss=loss, **options)[0].losses

    first = losses_of(3, checkpoints=tmp_path)
    assert first + losses_of(8, checkpoints=tmp_path) == losses_of(8)


class Broken(torch.utils.data.Dataset):
    """A dataset with one unreadable element, until it is repaired."""

    def __init__(self):
        self.broken = True
        self.jitter = None
        self.inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.broken and index == 13:
            raise OSError("a damaged file")
        inputs = self.inputs[index] + (self.jitter.random() if self.jitter else 0)
        return inputs, inputs.sum(0, keepdim=True)


class Fails(training.Callback):
    def on_log(self, entry):
        if entry.step == 4:
            raise RuntimeError("on purpose")


def test_checkpoint_that_cannot_be_written_ends_training_at_the_next_boundary(
    tmp_path, monkeypatch
):
    save, futures, full = training.Checkpoints.save, [], ExitStack()

    def recorded(*arguments):
        futures.append(save(*arguments))

    class FullDisk(training.Callback):
        def on_step(self, step):
            if step == 4:
                full.enter_context(file_size_limit(100))
            if step == 5:
                until(futures[-1].done)
                full.close()

    monkeypatch.setattr(training.Checkpoints, "save", recorded)
    options = {"checkpoints": tmp_path, "checkpoint_every": 4, "log_every": 2}
    with full, pytest.raises(CheckpointError, match=r"step-00000004\.pt could not be written"):
        run(8, callbacks=[FullDisk()], **options)
    rest, _ = run(8, **options)
    assert rest.resumed_from == 6  # there was room for a last checkpoint


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("cause", ["data", "callback"])
def test_after_an_exception_training_resumes_where_it_stopped(tmp_path, cause, ahead):
    def trained(*, broken, **options):
        dataset = Broken()
        dataset.broken = broken and cause == "data"
        of = (*problem()[:2], training.Batches(dataset, 2, seed=1))
        return run(12, of=of, ahead=ahead, log_every=2, **options)[0]

    whole = trained(broken=False)
    seen = Seen()
    callbacks = [seen] + ([Fails()] if cause == "callback" else [])
    with pytest.raises((OSError, RuntimeError), match=r"damaged file|on purpose"):
        trained(broken=True, checkpoints=tmp_path, callbacks=callbacks)
    assert seen.checkpoints != []
    rest = trained(broken=False, checkpoints=tmp_path)
    assert rest.resumed_from == seen.checkpoints[-1] > 0
    assert rest.losses == whole.losses[rest.resumed_from :]


def test_an_exception_in_the_middle_of_a_step_leaves_no_checkpoint(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("on purpose")
        return mse(model, batch)

    with pytest.raises(RuntimeError, match="on purpose"):
        run(8, loss=loss, checkpoints=tmp_path)
    assert list(tmp_path.glob("*.pt")) == []


def drawing_evaluation(model):
    torch.rand(3)
    return {}


@pytest.mark.parametrize(
    ("ahead", "checkpoint_every", "stop"),
    [(0, 1, 4), (3, 1, 5), (0, 2, 5), (3, 2, 4), (0, 3, 4), (3, 3, 5)],
)
def test_run_resumes_exactly_from_any_step(tmp_path, ahead, checkpoint_every, stop):
    def losses_of(steps, strategy="linear", **options):
        model, optimizer, _ = problem()
        options["schedule"] = SWALR(optimizer, 0.001, 9, strategy)
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
        samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        data = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
        options |= {"ahead": ahead, "evaluate": drawing_evaluation, "evaluate_every": 2}
        return run(steps, of=(model, optimizer, data), **options)[0].losses

    whole = losses_of(12)
    assert whole != losses_of(12, "cos")
    saving = {"checkpoints": tmp_path, "checkpoint_every": checkpoint_every}
    first = losses_of(stop, log_every=1, **saving)
    torch.manual_seed(77)
    rest = losses_of(12, "cos", log_every=3, **saving)  # the checkpoint's strategy continues
    assert first + rest == whole


@pytest.mark.parametrize(("ahead", "count"), [(None, 0), (0, 0), (2, 1)])
def test_loading_ahead_on_a_cpu_warns_that_dropout_resumes_differently(
    ahead, count, tmp_path, caplog
):
    run(ahead=ahead)  # has nothing to resume
    run(ahead=ahead, checkpoints=tmp_path)
    assert sum("will not resume exactly" in each.getMessage() for each in caplog.records) == count


def test_one_shot_data_is_accepted_without_checkpoints(tmp_path):
    model, optimizer, data = problem()
    of = (model, optimizer, (next(data) for _ in range(50)))
    assert run(20, of=of, ahead=2, log_every=5)[0].step == 20
    with pytest.raises(ConfigError, match="its position cannot be saved"):
        run(30, of=of, checkpoints=tmp_path)


def test_stop_and_sigterm_at_once_write_checkpoint_and_end_process(tmp_path):
    class StopAtOnce(training.Callback):
        def on_log(self, entry):
            raise training.StopTraining

    class Terminated(training.Callback):
        def on_log(self, entry):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run(8, log_every=2, checkpoints=tmp_path, callbacks=[StopAtOnce(), Terminated()])
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-00000002.pt"]

    def evaluate(model):  # the last evaluation
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    with pytest.raises(SystemExit):
        run(3, evaluate=evaluate)


class OddModel(nn.Linear):
    """A model whose state has a set, which no checkpoint can hold."""

    def get_extra_state(self):
        return {1, 2}

    def set_extra_state(self, state):
        pass


class OddPart:
    def state_dict(self):
        return {"words": {1, 2}}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("make_model", "stateful", "place"),
    [(OddModel, {}, "_extra_state"), (nn.Linear, {"odd": OddPart()}, "words")],
)
def test_unsavable_state_is_refused_before_first_step(tmp_path, make_model, stateful, place):
    seen, model = Seen(), make_model(4, 1)
    of = (model, training.SGD(model.parameters(), lr=0.1), problem()[2])
    with pytest.raises(ConfigError, match=place):
        run(5, of=of, stateful=stateful, checkpoints=tmp_path, callbacks=[seen])
    assert not seen.entries


def test_directory_without_write_access_is_refused_before_first_step(tmp_path):
    (tmp_path / ".lock").mkdir()  # as root, a test may write to every directory
    seen = Seen()
    with pytest.raises(ConfigError, match=r"cannot hold checkpoints: .*\.lock"):
        run(5, checkpoints=tmp_path, callbacks=[seen])
    assert not seen.entries


@pytest.fixture
def start(jobs, tmp_path):
    """Return a function that starts the training job, which writes its losses to a file."""

    def start(*options, name="job"):
        arguments = (tmp_path / name, f"--steps={STEPS}", *options)
        return jobs.start(tmp_path, *arguments, script=TRAIN_JOB, under="torch")

    return start


@pytest.mark.parametrize(
    ("data", "threads"),
    [("batches", True), pytest.param("loader", False, marks=pytest.mark.extended)],
)
def test_killed_at_random_steps_the_loss_curve_is_that_of_an_uninterrupted_run(
    start, tmp_path, data, threads
):
    arguments = [f"--data={data}"]
    if threads:  # a model's dropout would draw from the generator of the loading thread
        arguments += ["--ahead=2", "--precision=fp16", "--no-dropout"]
    whole = start(*arguments, name="whole").finish()
    kills = random.Random(f"{data} {threads}")
    arguments += [f"--checkpoints={tmp_path / 'checkpoints'}", "--slow=0.002"]
    for _ in range(3):
        job = start(*arguments)
        until_step(kills.randrange(2, 34), tmp_path / "job", job)
        job.kill()
    last = start(*arguments).finish()
    assert last.report["resumed_from"] > 0
    assert losses_of(tmp_path / "job") == losses_of(tmp_path / "whole")
    assert last.report["weights"] == whole.report["weights"]


@pytest.mark.parametrize(
    ("asked", "options"),
    [(signal.SIGTERM, ("--ahead=3", "--no-dropout", "--accumulate=2")), (signal.SIGINT, ())],
)
def test_signal_writes_checkpoint_of_current_step_and_ends_process(start, tmp_path, options, asked):
    start(*options, name="whole").finish()
    checkpoints = (f"--checkpoints={tmp_path / 'checkpoints'}", "--checkpoint-every=1000")
    job = start(*options, *checkpoints, "--hold-at=70")  # in the second epoch
    until(lambda: (tmp_path / "job.held").exists() or job.ended())
    os.kill(job.pid, asked)
    (tmp_path / "job.go").touch()
    if asked == signal.SIGTERM:
        assert job.status() == 128 + asked
    else:
        assert job.status() != 0
        assert job.errors.read_text().endswith("KeyboardInterrupt\n")
    made = max(losses_of(tmp_path / "job"))
    assert 0 < made < STEPS
    rest = start(*options, *checkpoints).finish()
    assert rest.report["resumed_from"] == made
    assert losses_of(tmp_path / "job") == losses_of(tmp_path / "whole")


@pytest.mark.extended  # test_parallel proves it without torchrun
def test_two_processes_train_as_one_with_their_batches_together(start, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [
            Path(sys.executable).with_name("torchrun"),
            "--standalone",
            "--nproc-per-node=2",
            TRAIN_JOB,
            tmp_path / "two.json",
            tmp_path / "two.losses",
            "--steps=20",
            "--no-dropout",
            "--ranks",
            "--fuse=forward",
            "--stop-at=11",  # only the first process requests the stop; both stop at the boundary
            f"--checkpoints={tmp_path / 'checkpoints'}",
        ],
        env=environment,
        check=True,
        timeout=120,
    )
    one = start("--steps=20", "--no-dropout", "--accumulate=2", "--stop-after=12").finish()
    first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("two.json", "two.json.1")
    )
    assert first["step"] == second["step"] == 12
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(one.report["weights"], abs=1e-5)
    with training.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        last = checkpoints.load()
    assert last.step == 12
    places = [sorted(place) for place in last.state["data"]]
    assert places == [["batch", "data", "epoch", "generators"]] * 2

    alone = ("--steps=20", "--no-dropout", "--batch=8")
    whole = start(*alone, name="whole").finish()
    rest = start(*alone, f"--checkpoints={tmp_path / 'checkpoints'}", name="rest").finish()
    assert rest.report["resumed_from"] == 12
    assert rest.report["weights"] == pytest.approx(whole.report["weights"], abs=1e-5)


def test_other_number_of_processes_needs_data_with_position(tmp_path):
    model, optimizer, batches = problem()
    data = [next(batches) for _ in range(6)]
    options = {"loss": mse, "checkpoints": tmp_path, "progress": False}
    training.train(model, optimizer, data, steps=5, **options)
    with training.Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.load().state
        checkpoints.save(6, state | {name: state[name] * 2 for name in ("data", "random")}).result()
    with pytest.raises(ConfigError, match="made by 2 processes, not by 1"):
        training.train(model, optimizer, data, steps=9, **options)
