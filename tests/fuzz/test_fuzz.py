"""Parsers keep their invariants for every input: each target runs for seconds, from its seeds.

`make fuzz` runs them for longer.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent
RUNS = {
    "paths": 40_000,
    "headers": 60_000,
    "bodies": 30_000,
    "signatures": 12_000,
    "conversations": 2_000,
}

PLANTED = """
import atheris
from harness import main

@atheris.instrument_func
def check(data):
    if len(data) == 5 and data[0] == 0x67:
        if data[1] == 0x73:
            if data[2] == 0x74:
                if data[3] == 0x5F:
                    raise AssertionError("the planted bug")

main(check, seeds=(b"hello",))
"""


def fuzz(program, inputs, *options):
    # `timeout` forks, so that libFuzzer's memory peak does not include the peak of this process.
    return subprocess.run(
        ["timeout", "240", sys.executable, program, inputs, "-seed=7", *options],
        env={**os.environ, "PYTHONPATH": str(FUZZ), "TMPDIR": str(inputs.parent)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def test_every_target_runs_here_and_in_make_fuzz():
    targets = {path.stem for path in FUZZ.glob("*.py")} - {"conftest", "harness", "test_fuzz"}
    (line,) = [
        line
        for line in (FUZZ.parents[1] / "Makefile").read_text().splitlines()
        if line.startswith("FUZZ_TARGETS")
    ]

    assert targets == set(RUNS) == set(line.partition("?=")[2].split())


@pytest.mark.parametrize(
    "target",
    [
        *("paths", "headers", "signatures"),
        # These instrument more modules, for 5 seconds.
        *(pytest.param(each, marks=pytest.mark.extended) for each in ("bodies", "conversations")),
    ],
)
def test_target_accepts_every_input(target, tmp_path, is_extended):
    runs = RUNS[target] if is_extended else RUNS[target] // 10
    done = fuzz(FUZZ / f"{target}.py", tmp_path, f"-runs={runs}")

    assert done.returncode == 0, done.stderr[-6000:]
    (made,) = re.findall(r"^Done (\d+) runs in", done.stderr, re.MULTILINE)
    assert int(made) >= runs  # libFuzzer sometimes makes one more


def test_planted_bug_is_found_and_its_printed_input_reproduces_it(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    inputs = tmp_path / "inputs"

    done = fuzz(tmp_path / "planted.py", inputs, "-runs=2000000")

    assert done.returncode != 0
    assert "the input that fails planted: b'gst_" in done.stderr
    (crash,) = inputs.glob("crash-*")
    again = fuzz(tmp_path / "planted.py", crash)
    assert again.returncode != 0
    assert "the planted bug" in again.stderr
