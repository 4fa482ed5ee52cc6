"""`make bench-tuning`, on a small table that is made here."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tuning import gemm

ROOT = Path(__file__).parents[3]
RUN = ROOT / "tests" / "benchmarks" / "tuning" / "run.py"

PLUGGED = """
from benchmarks.tuning.problems import Problem
from graphstash.tuning import GemmSpace

def problems():
    return [Problem("plugged", GemmSpace(8, 8, 8), lambda tiling: float(sum(tiling)))]
"""


def table(folder):
    """A made-up kernel: 60 of 64 tilings work, and one of 16 x 16 is the fastest."""
    rows = [
        f"{m},{n},{v},{'invalid' if v > m else abs(m - 16) + abs(n - 16) + 4 / v + 1}"
        for m in (4, 8, 16, 32)
        for n in (4, 8, 16, 32)
        for v in (1, 2, 4, 8)
    ]
    with gzip.open(folder / "made.csv.gz", "wt") as out:
        out.write("\n".join(["M,N,V,milliseconds", *rows]) + "\n")


def bench(folder, *options):
    return subprocess.run(
        [sys.executable, RUN, "--directory", folder / "out", "--seeds", "3", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


def test_the_benchmark_replays_a_table_and_what_is_plugged_in(tmp_path):
    table(tmp_path)
    (tmp_path / "plugged.py").write_text(PLUGGED)
    options = ("--lattices", "--tables", tmp_path, "--problems", "plugged:problems")
    done = bench(tmp_path, *options, "--arms", "random", "g-bfs", "xgboost")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "bench-tuning.json").read_text())
    assert report["problems"]["made"]["size"] == 64
    assert report["problems"]["plugged"]["size"] == 10 * 4 * 10 * 4
    rows = report["problems"]["made"]["rows"]
    assert set(rows) == {"random", "g-bfs", "xgboost"}
    assert all(cells["5.0% (4)"]["min"] >= 1 for cells in rows.values())
    pages = (tmp_path / "out" / "bench-tuning.md").read_text()
    assert "## made" in pages
    assert "## plugged" in pages
    assert (tmp_path / "out" / "bench-tuning.png").stat().st_size > 1000


@pytest.mark.parametrize("text", ["M,N\n1,2\n", None], ids=["other columns", "no file"])
def test_a_folder_without_tables_is_refused(tmp_path, text):
    if text:
        (tmp_path / "other.csv").write_text(text)
    done = bench(tmp_path, "--lattices", "--tables", tmp_path)
    assert done.returncode != 0
    assert "milliseconds" in done.stderr or "no CSV files" in done.stderr


def test_without_the_environment_of_tvm_the_benchmark_says_what_is_missing(monkeypatch):
    def fails(name):
        raise subprocess.CalledProcessError(2, ["uv", "pip", "install", name])

    monkeypatch.setattr(gemm, "python_of", fails)
    with pytest.raises(SystemExit, match=r"tests/environments/tvm\.txt .*'tvm'.* --gemm"):
        next(gemm.gemms([16]))
