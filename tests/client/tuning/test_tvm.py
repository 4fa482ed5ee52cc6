"""TVM compiles matrix multiplications; a process runs them and compares with the exact result."""

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Measurements of non-square products in TVM's environment."""
    settings = {"cases": "tvm_products", "environment": "tvm", "under": "python"}
    with CompilerJobs(tmp_path_factory.mktemp("tvm"), **settings) as jobs:
        arguments = {"sizes": [16, 64, 32], "drawn": 6}
        yield jobs.run("host", "measured", arguments, enabled="false").report


def test_every_split_of_the_loops_gives_the_right_result(found):
    *legal, _ = found["TvmGemm"]
    assert len(legal) == 8
    for each in legal:
        assert each["failure"] is None, each
        assert 0 < each["cost"] < 1
        assert each["count"] >= 1


def test_factors_whose_product_is_too_small_do_not_compile(found):
    assert found["TvmGemm"][-1]["failure"] == "compile"


@pytest.mark.parametrize("kernel", ["DoesNothing", "MissesOneProduct"])
def test_kernel_with_wrong_result_is_detected(found, kernel):
    assert [each["failure"] for each in found[kernel]] == ["wrong"]


def test_target_is_described_by_sizes_type_and_version(found):
    sizes = {"m": 16, "k": 64, "n": 32}
    others = {"target": "tvm-gemm", "dtype": "float32", "tvm": "0.27.0"}
    assert found["describe"] == sizes | others
