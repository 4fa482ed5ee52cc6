from pathlib import Path

import pytest
import torch
from torch import nn

from graphstash import GraphstashError
from graphstash.training.loop.parallel import Parallel
from support.ranks import reports_of_ranks

JOB = Path(__file__).parents[2] / "support" / "parallel_job.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    """Of two processes, and of one with batches of twice the size."""
    directory = tmp_path_factory.mktemp("gloo")
    return [*reports_of_ranks(jobs, directory, JOB, 2), *reports_of_ranks(jobs, directory, JOB, 1)]


@pytest.fixture(params=["with inf", "accumulated"])
def trained(reports, request):
    """What came of their training, with inf in the last one's loss or with micro-batches."""
    return [report[request.param] for report in reports]


def test_processes_know_their_place(reports):
    assert [report["rank"] for report in reports] == [[0, 2, True], [1, 2, False], [0, 1, True]]


def test_a_group_of_one_process_is_one_process(reports):
    kinds = [report["kind"] for report in reports]
    assert kinds == ["DistributedTorch", "DistributedTorch", "Parallel"]


def test_a_model_is_wrapped_once(trained):
    assert not any(report["wrapped_twice"] for report in trained)


def test_all_processes_have_the_same_bits(trained):
    first, second, _ = trained
    for name in ("parameters", "state", "scales"):
        assert first[name] == second[name]


def test_two_processes_train_as_one_with_twice_the_batch(trained):
    first, _, one = trained
    for pair in zip(first["parameters"], one["parameters"], strict=True):
        torch.testing.assert_close(*map(torch.tensor, pair), rtol=1e-5, atol=1e-6)
    assert first["scales"] == one["scales"]


def test_inf_in_one_process_makes_all_leave_out_the_step(reports):
    bad = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    for report in reports:
        assert report["with inf"]["found_inf"] == bad
        assert report["with inf"]["unchanged"] == [bool(one) for one in bad]


def test_gradients_are_reduced_once_a_step_accumulated_or_not(trained):
    for report in trained[:2]:
        assert report["reductions"] == len(report["found_inf"])


def test_processes_tell_each_other_values(reports):
    first, second, one = reports
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert one["gathered"] == [{"rank": 0}]


def test_processes_that_disagree_all_say_so(reports):
    first, second, one = reports
    assert first["error"] == second["error"]
    assert "the rank differs between processes (by rank: [0, 1])" in first["error"]
    assert "error" not in one


def test_one_process_is_on_its_own():
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


def test_processes_of_torchrun_that_do_not_know_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(GraphstashError, match=r"torchrun .* call torch.distributed.init_process"):
        Parallel.current(CPU)


@pytest.mark.extended
def test_on_torch_xla_all_gradients_are_reduced_by_one_operation_of_the_step(jobs, tmp_path):
    report = jobs.start(tmp_path, "--on", "torch_xla", script=JOB, under="").finish().report
    assert report["alone"]
    assert report["reductions"] == 1
    assert report["half"] == [True] * 4
    assert report["counts"] == [[1, 1], [0, 1], [0, 1], [0, 1]]
    assert report["gathered"] == [{"rank": 0}]
