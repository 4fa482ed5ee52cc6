"""Every change of a table of torch changes the next key, however the hook compares tables."""

import os
import subprocess
from pathlib import Path

import pytest

from support.environments import python_of

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("compared", ["versions", "members"])
@pytest.mark.parametrize(
    "environment", ["", pytest.param("torch-newest", marks=pytest.mark.extended)]
)
def test_changed_table_changes_the_next_key(environment, compared, tmp_path):
    ran = subprocess.run(
        [python_of(environment), "-m", "compilers.wrong_hits.changed_tables", compared],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 10
