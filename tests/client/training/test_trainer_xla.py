import os
import random
import subprocess
import sys

import pytest

from support.jobs import TRAIN_JOB, losses_of, until_step
from support.waiting import PATIENT_VARIABLES

STEPS = 30


def options(directory, *more):
    return (directory / "losses", "--device=xla", f"--steps={STEPS}", *more)


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    """Uninterrupted runs without a cache, by whether the step is traced."""
    runs = {}
    for traced in (False, True):
        directory = tmp_path_factory.mktemp("whole")
        more = ("--traced",) if traced else ()
        job = jobs.start(
            directory, *options(directory, *more, "--log-every=10"), script=TRAIN_JOB, under=""
        )
        runs[traced] = job.finish().report, losses_of(directory / "losses")
    return runs


def between(report, first, last):
    return {
        name: report["counts"][str(last)][name] - report["counts"][str(first)][name]
        for name in report["counts"][str(last)]
    }


@pytest.mark.extended
@pytest.mark.parametrize("traced", [False, True])
def test_step_is_one_execution_and_boundary_one_read(whole, traced):
    report, losses = whole[traced]
    assert len(losses) == STEPS
    counts = between(report, 10, 20)
    assert counts["UncachedCompile"] == 0  # although the learning rate changes in every step
    assert counts["ExecuteTime"] == 10
    assert counts["TransferFromDeviceTime"] == 1


@pytest.mark.extended
def test_a_lazy_run_compiles_one_training_graph(whole):
    report, _ = whole[False]
    first = report["counts"]["10"]["UncachedCompile"] - report["started"]["UncachedCompile"]
    assert first == 1


@pytest.mark.extended
def test_killed_at_random_steps_the_loss_curve_is_that_of_an_uninterrupted_run(
    jobs, whole, tmp_path
):
    arguments = options(
        tmp_path,
        f"--checkpoints={tmp_path / 'checkpoints'}",
        "--checkpoint-every=3",
        "--slow=0.005",
        "--traced",
    )
    kills = random.Random(3)
    for _ in range(2):
        job = jobs.start(tmp_path, *arguments, script=TRAIN_JOB, under="")
        until_step(kills.randrange(5, 25), tmp_path / "losses", job)
        job.kill()
    outcome = jobs.start(tmp_path, *arguments, script=TRAIN_JOB, under="").finish()
    assert outcome.report["resumed_from"] > 0
    report, losses = whole[True]
    assert losses_of(tmp_path / "losses") == losses
    assert outcome.report["weights"] == report["weights"]


@pytest.mark.extended
def test_a_resumed_run_finds_all_its_graphs_in_the_cache(jobs, server, namespace, tmp_path):
    arguments = options(tmp_path, f"--checkpoints={tmp_path / 'checkpoints'}")
    settings = {"url": server.url, "namespace": namespace}
    first = jobs.start(
        tmp_path / "a", *arguments, "--job=mine", "--stop-after=12", script=TRAIN_JOB, **settings
    ).finish()
    second = jobs.start(
        tmp_path / "b", *arguments, "--job=mine", script=TRAIN_JOB, **settings
    ).finish()
    assert first.report["step"] == 12
    assert second.report["resumed_from"] == 12
    assert second.report["counts"][str(STEPS)]["UncachedCompile"] == 0
    assert second.hits > 0
    elsewhere = os.environ | PATIENT_VARIABLES
    elsewhere |= {
        "GRAPHSTASH_URL": server.url,
        "GRAPHSTASH_NAMESPACE": namespace,
        "GRAPHSTASH_CACHE_DIR": str(tmp_path / "c"),
    }
    command = [sys.executable, "-m", "graphstash", "prefetch", "mine"]
    prefetched = subprocess.run(command, env=elsewhere, capture_output=True, text=True, check=True)
    assert int(prefetched.stdout.split()[0]) >= second.hits


@pytest.mark.extended
@pytest.mark.parametrize("traced", [False, True])
def test_evaluation_that_draws_on_the_device_does_not_change_the_training(
    jobs, whole, tmp_path, traced
):
    more = ("--evaluate-every=10", *(["--traced"] if traced else []))
    jobs.start(
        tmp_path, *options(tmp_path, *more, "--log-every=10"), script=TRAIN_JOB, under=""
    ).finish()
    assert losses_of(tmp_path / "losses") == whole[traced][1]
