"""TVM compiles matrix multiplications, which are run and compared with the exact result."""

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measures products of these sizes in TVM's environment."""
    settings = {"cases": "tvm_products", "environment": "tvm", "under": "python"}
    with CompilerJobs(tmp_path_factory.mktemp("tvm"), **settings) as jobs:
        yield (
            lambda *sizes, drawn: (
                jobs.run(
                    "host", "measured", {"sizes": sizes, "drawn": drawn}, enabled="false"
                ).report
            )
        )


@pytest.fixture(scope="module")
def found(measured):
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
def test_kernel_with_wrong_result_is_detected(found, kernel):
    assert [each["failure"] for each in found[kernel]] == ["wrong"]


def test_target_is_described_by_sizes_type_and_version(found):
    sizes = dict.fromkeys("mkn", 64)
    others = {"target": "tvm-gemm", "dtype": "float32", "tvm": "0.27.0"}
    assert found["describe"] == sizes | others


def test_matrices_need_not_be_square(measured):
    found = measured(16, 64, 32, drawn=3)
    assert [each["failure"] for each in found["TvmGemm"]] == [None] * 5 + ["compile"]
