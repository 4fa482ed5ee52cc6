"""The examples train in every loop, and the benchmark of the loops measures and reports."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from support.run_case import RUN_CASE, case_arguments

pytestmark = pytest.mark.extended

TESTS = Path(__file__).parents[2]
EXAMPLES = TESTS.parent / "client" / "examples"
ENVIRONMENT = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
COSTS = "Per step between boundaries, over all cells of the model"


@pytest.fixture
def train_digits(monkeypatch, tmp_path):
    """Return a function that runs the example in this process, on one core, for its report."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch
    import train_digits

    def run(*options):
        report = tmp_path / "report.json"
        train_digits.main([*options, "--report", str(report)])
        return json.loads(report.read_text())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (("--optimizer", "SGD", "--steps", "100"), 1e-3),
        (("--optimizer", "AdamW", "--steps", "100"), 1e-3),
        (("--precision", "bf16", "--steps", "30"), 1e-2),
        (("--precision", "fp16", "--steps", "30"), 1e-2),
    ],
)
def test_every_loop_learns_the_digits_with_equal_losses(train_digits, options, tolerance):
    options += ("--log-every", "10")
    reports = {arm: train_digits("--loop", arm, *options) for arm in ("plain", "best", "ours")}
    for report in reports.values():
        assert report["accuracy"] > 0.8
        assert report["losses"][:3] == pytest.approx(reports["plain"]["losses"][:3], rel=tolerance)


def test_default_run_classifies_97_percent_of_test_images(train_digits):
    assert train_digits()["accuracy"] > 0.97


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # from torch.compile
def test_a_traced_loop_learns_the_digits(train_digits, monkeypatch):
    """Without C++, which takes a minute of CPU time. tests/unit/training compiles smaller steps."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    options = ("--optimizer", "SGD", "--steps", "100", "--log-every", "10")
    traced, lazy = (train_digits("--loop", arm, *options) for arm in ("ours-traced", "ours"))
    assert counters["aot_autograd"]["ok"] > 0
    assert traced["accuracy"] > 0.85
    assert traced["losses"][:5] == pytest.approx(lazy["losses"][:5], rel=1e-3)


def test_loops_have_equal_losses_on_torch_xla_and_only_the_plain_loop_reads(jobs, tmp_path):
    options = case_arguments("examples:on_torch_xla")
    report = jobs.start(tmp_path, *options, script=RUN_CASE, under="").finish().report
    for example in ("digits", "gpt"):
        arms = report[example]
        for arm in arms.keys() - {"plain"}:
            counts = arms[arm]["per_step"]
            assert counts == {"reads": 0, "executions": 1, "compiles": 0}, (example, arm)
            assert arms[arm]["losses"] == pytest.approx(arms["plain"]["losses"], rel=1e-2)
        assert arms["plain"]["per_step"]["reads"] >= 1
    assert report["gpt"]["ours-traced"]["reason"] is None
    assert report["gpt_by_our_loop"] == pytest.approx(report["gpt_as_ever"], rel=1e-4)


def test_the_benchmark_writes_report_plot_and_figures(tmp_path):
    subprocess.run(
        [
            *(sys.executable, str(TESTS / "benchmarks" / "training" / "run.py"), "--quick"),
            *("--backends", "torch", "--models", "MLP", "--optimizers", "SGD", "--rounds", "2"),
            *("--arms", "plain", "best", "ours", "--directory", str(tmp_path)),
            *("--parts", "loops", "overlap"),
        ],
        env=ENVIRONMENT,
        check=True,
    )
    report = json.loads((tmp_path / "bench-training.json").read_text())
    assert report["failed"] == []
    tables = report["parts"]["torch"]["tables"]
    rates = tables["Steps per second"]["MLP 32 SGD"]
    assert {arm: len(rates[arm]["samples"]) for arm in rates} == {"plain": 2, "best": 2, "ours": 2}
    reads = {row: cells["reads"]["median"] for row, cells in tables[COSTS].items()}
    assert reads == {"MLP, plain": 2, "MLP, best": 0, "MLP, ours": 0}
    text = (tmp_path / "bench-training.md").read_text()
    assert "MLP 32 SGD" in text
    assert (tmp_path / "bench-training.png").read_bytes().startswith(b"\x89PNG")
