"""TVM compiles matrix multiplications, which are run and compared with the exact result."""

import json
import subprocess
from pathlib import Path

import pytest

from support.environments import python_of

JOB = Path(__file__).parents[2] / "support" / "tvm_job.py"

pytestmark = pytest.mark.extended


def measured(*sizes, drawn):
    command = [python_of("tvm"), JOB, json.dumps(sizes), str(drawn)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


@pytest.fixture(scope="module")
def found():
    return measured(64, 64, 64, drawn=12)


def test_every_split_of_the_loops_gives_the_right_result(found):
    *legal, _ = found["TvmGemm"]
    assert len(legal) == 14
    for each in legal:
        assert each["failure"] is None, each
        assert 0 < each["cost"] < 1
        assert each["count"] >= 1


def test_factors_whose_product_is_too_small_do_not_compile(found):
    assert found["TvmGemm"][-1]["failure"] == "compile"


@pytest.mark.parametrize("kernel", ["DoesNothing", "MissesOneProduct"])
def test_a_kernel_with_a_wrong_result_is_found_out(found, kernel):
    assert [each["failure"] for each in found[kernel]] == ["wrong"]


def test_a_target_is_described_by_sizes_type_and_version(found):
    assert found["describe"] == {
        "target": "tvm-gemm",
        "m": 64,
        "k": 64,
        "n": 64,
        "dtype": "float32",
        "tvm": "0.27.0",
    }


def test_matrices_need_not_be_square():
    found = measured(16, 64, 32, drawn=3)
    assert [each["failure"] for each in found["TvmGemm"]] == [None] * 5 + ["compile"]
