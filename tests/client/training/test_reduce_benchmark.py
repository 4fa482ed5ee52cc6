"""`make bench-reduce`: its network links, and its smallest cell on them."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reduce import links

TESTS = Path(__file__).parents[2]
RUN = TESTS / "benchmarks" / "reduce" / "run.py"

SMALLEST = (
    *("--workers", "2", "--rates", "1", "--sizes", "1", "--densities", "1", "0.1"),
    *("--overlaps", "full", "--models", "CNN", "--steps", "2", "--rounds", "1"),
)

HOLDER = """
import subprocess, sys
from benchmarks.reduce.links import Star

with Star(2, 1) as star:
    child = subprocess.Popen([*star.command(0), "sh", "-c", "echo $$; exec sleep 1000"])
    sys.stdin.read()
"""


def allowed():
    try:
        with links.Star(1, 1):
            return True
    except RuntimeError:
        return False


needs_namespaces = pytest.mark.skipif(
    "not allowed()", reason="network namespaces need root and Debian's iproute2"
)


def of_process(pid):
    return [name for name in links.names() if name.startswith(f"{links.PREFIX}-{pid}-")]


@needs_namespaces
@pytest.mark.extended
def test_smallest_cell_on_shaped_links_sends_bytes_of_the_formula(tmp_path):
    command = [sys.executable, RUN, *SMALLEST, "--directory", tmp_path]
    subprocess.run(command, check=True, timeout=300)
    report = json.loads((tmp_path / "bench-reduce.json").read_text())
    assert report["links"] == "network namespaces"
    sums, training = report["parts"].values()
    rows = sums["tables"]["MB on all links for each worker, 1 MiB"]
    arms = {"ring", "coo", "blocks", "look", "paused", "dedicated", "colocated"}
    assert set(rows["1"]) == arms
    assert set(rows["0.1, full"]) == arms - {"ring", "look", "paused"}
    assert rows["0.1, full"]["blocks"]["median"] < 0.15 * rows["1"]["ring"]["median"]
    assert all(line.endswith("in 11 of 11 samples") for line in report["checks"][:2])
    assert all(goal["cells"] for goal in report["goals"])
    losses = training["tables"]["Mean loss: CNN"]
    assert losses["blocks"] == losses["dedicated"] == losses["colocated"] == losses["dense"]
    assert losses["thresholding"] != losses["dense"]
    page = (tmp_path / "bench-reduce.md").read_text()
    assert "payload equal to the formula, to the byte: in 11 of 11 samples" in page
    assert (tmp_path / "bench-reduce.png").stat().st_size > 1000


@needs_namespaces
def test_a_killed_run_ends_its_workers_and_the_next_one_removes_its_links():
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, **streams) as holder:
        child = os.pidfd_open(int(holder.stdout.readline()))
        links.sweep()
        assert len(of_process(holder.pid)) == 3  # the namespace lives
        holder.kill()
    ended, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ended
    assert len(of_process(holder.pid)) == 3
    links.sweep()
    assert of_process(holder.pid) == []
