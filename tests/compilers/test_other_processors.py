"""The inductor hook's tests, repeated as on another x86-64 processor.

ATEN_CPU_CAPABILITY limits the instructions that torch uses. PRETEND_ISA sets the instructions that
Inductor detects. With AMX, Inductor first builds one more object. The tests themselves run on the
processor of this machine, with its vector instructions, so here torch uses no vectors, and Inductor
detects AMX if this processor lacks it. One run has both differences: a job that builds C++ kernels
takes half a minute of CPU time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

HERE = Path(__file__).parent


def test_promises_hold_on_another_processor():
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    seen = "avx2" if has_amx else "avx2 avx512 amx_tile"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            HERE / "test_inductor_objects.py",
            f"{HERE / 'test_inductor_entries.py'}::test_a_graph_is_compiled_once",
            f"{HERE / 'test_inductor.py'}::TestInductor::test_another_host_runs_no_compiler",
        ],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "PRETEND_ISA": seen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
