"""`make bench-tuning` measures matrix multiplications of TVM."""

import json
import sys
from pathlib import Path

import pytest

from support.processes import captured

RUN = Path(__file__).parents[2] / "benchmarks" / "tuning" / "run.py"

pytestmark = pytest.mark.extended


def test_searchers_are_compared_on_a_matrix_multiplication_of_tvm(tmp_path):
    options = ("--lattices", "--gemm", "16", "--most", "0.001", "--seeds", "2")
    arms = ("--arms", "random", "g-bfs", "xgboost")
    command = [sys.executable, RUN, *options, *arms, "--directory", tmp_path]
    done = captured(command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "bench-tuning.json").read_text())["problems"]["TVM 16^3"]
    assert found["size"] == 35 * 5 * 35
    assert set(found["runs"]) == {"random", "g-bfs", "xgboost"}
    for runs in found["runs"].values():
        assert len(runs) == 2
        for run in runs:
            assert run["failed"] == 0
            assert len(run["best"]) == len(run["seconds"]) == 7  # 0.1 % of the space
            assert run["best"] == sorted(run["best"], reverse=True)
            assert run["seconds"] == sorted(run["seconds"])
            assert 0 < run["final"] < 0.001
    lowest = min(row["re-measured"]["min"] for row in found["rows"].values())
    assert lowest == 1
    page = (tmp_path / "bench-tuning.md").read_text()
    assert "of xgboost's (paper: 24%)" in page
    assert "not compared of rnn's (paper: 40%)" in page
    assert (tmp_path / "bench-tuning.png").stat().st_size > 1000
