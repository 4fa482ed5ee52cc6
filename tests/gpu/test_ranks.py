"""On a GPU, sparse gradients and a captured step train as plain DDP does."""

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.gpu


@pytest.fixture
def start(tmp_path):
    variables = {"PJRT_DEVICE": "", "CUDA_MODULE_LOADING": "LAZY"}
    with CompilerJobs(tmp_path, cases="gpu_ranks", under="python", variables=variables) as jobs:
        yield jobs.start


def test_two_ranks_train_to_the_bits_of_dense_gradients_over_gloo(start, tmp_path):
    store = (tmp_path / "store").as_uri()
    ranks = [
        start(f"rank-{number}", "ddp", {"number": number, "size": 2, "store": store})
        for number in range(2)
    ]
    first, second = (rank.finish().report for rank in ranks)
    assert first["sums"] == second["sums"]
    assert first["sparse"]
    assert first["aggregated"]


def test_captured_step_under_nccl_has_the_bits_of_ddp(start, tmp_path):
    report = start("rank", "nccl", {"store": (tmp_path / "store").as_uri()}).finish().report
    assert (report["mode"], report["reason"]) == ("traced", None)
    assert report["traced"] == report["plain"]
