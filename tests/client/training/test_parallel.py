"""Two processes train as one with twice the batch, and all skip a step that one must skip."""

import pytest
import torch
from torch import nn

from graphstash import GraphstashError
from graphstash.training.loop.parallel import Parallel
from support.run_case import RUN_CASE, case_arguments

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reports(ranks):
    """Reports of two processes, and of one process with batches of twice the size."""
    return [*ranks(2).run("parallel:on_gloo"), *ranks(1).run("parallel:on_gloo")]


def test_processes_have_ranks_and_group_of_one_is_one_process(reports):
    assert [report["rank"] for report in reports] == [[0, 2, True], [1, 2, False], [0, 1, True]]
    kinds = [report["kind"] for report in reports]
    assert kinds == ["DistributedTorch", "DistributedTorch", "Parallel"]


@pytest.mark.parametrize("how", ["with inf", "accumulated"])
def test_two_processes_train_as_one_with_twice_the_batch(reports, how):
    first, second, one = (report[how] for report in reports)
    assert first == second
    for pair in zip(first["parameters"], one["parameters"], strict=True):
        torch.testing.assert_close(*map(torch.tensor, pair), rtol=1e-5, atol=1e-6)
    assert first["scales"] == one["scales"]


def test_processes_share_values_and_detect_disagreement(reports):
    first, second, one = reports
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert one["gathered"] == [{"rank": 0}]
    assert first["error"] == second["error"]
    assert "the rank differs between processes (by rank: 0, 1)" in first["error"]
    assert one["error"] == ""


def test_training_with_other_arguments_is_refused_in_every_process(ranks):
    first, second = ranks(2).run("parallel:disagreements")
    assert first == second
    assert first == {
        "lr": "lr of group 0 differs between processes (by rank: 0.1, 0.2)",
        "clip_norm": "clip_norm differs between processes (by rank: 1.0, 2.0)",
        "accumulate": "accumulate differs between processes (by rank: 1, 2)",
        "steps": "steps differs between processes (by rank: 4, 5)",
        "log_every": "the set of logging boundaries differs between processes (by rank: "
        "([2], True), ([3], True))",
        "evaluate_every": "the set of logging boundaries differs between processes (by rank: "
        "([2], True), ([2, 3], True))",
        "checkpoints": "checkpoint_every differs between processes (by rank: None, 1000)",
        "schedule": "the schedule's step_size differs between processes (by rank: 3, 4)",
        "loss_scale": "the loss scale's growth_interval differs between processes (by rank: 5, 6)",
        "evaluate on the first": "",
    }


def test_all_processes_raise_what_one_finds_in_the_directory(ranks, tmp_path):
    (tmp_path / ".lock").mkdir()  # only the first process locks
    for message in ranks(2).run("parallel:refusal", checkpoints=[str(tmp_path)] * 2):
        assert "cannot hold checkpoints" in message, message


def test_single_process_reduces_nothing():
    parallel = Parallel.current(CPU)
    model = nn.Linear(2, 1)
    assert parallel.wrap(model) is model
    with parallel.reducing(model, last=False):
        model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad.clone()
    parallel.reduce_gradients(model.parameters())
    assert torch.equal(model.weight.grad, gradient)
    assert (parallel.rank, parallel.world, parallel.is_first) == (0, 1, True)
    assert parallel.gather("x") == ["x"]


def test_processes_of_torchrun_without_group_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(GraphstashError, match=r"torchrun .* call torch.distributed.init_process"):
        Parallel.current(CPU)


@pytest.mark.extended
def test_on_torch_xla_all_gradients_are_reduced_by_one_operation_of_the_step(jobs, tmp_path):
    options = case_arguments("parallel:on_torch_xla")
    jobs.start(tmp_path, *options, script=RUN_CASE, under="").finish()
