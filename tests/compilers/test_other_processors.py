"""The inductor hook's tests, repeated as on other x86-64 processors.

ATEN_CPU_CAPABILITY limits the instructions that torch uses. PRETEND_ISA sets the instructions that
Inductor detects. With AMX, Inductor first builds one more object. The job that builds C++ kernels
runs with both variables.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("capability", "seen", "alone"),
    [
        ("default", "avx2", "test_inductor_entries.py::test_a_graph_is_compiled_once"),
        ("avx2", "avx2 avx512 amx_tile", "test_inductor_objects.py"),
    ],
    ids=["without vectors or AMX", "AMX"],
)
def test_promises_hold_on_other_processors(capability, seen, alone):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            HERE / alone,
            f"{HERE / 'test_inductor.py'}::TestInductor::test_another_host_runs_no_compiler",
        ],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "PRETEND_ISA": seen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
