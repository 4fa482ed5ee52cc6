"""On a GPU, sparse gradients, a captured step and fused updates train as plain DDP does."""

import os

import pytest

from support.compiler_jobs import CompilerJobs

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("TEST_DEVICE", "cuda")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    variables = {"PJRT_DEVICE": "", "CUDA_MODULE_LOADING": "LAZY"}
    directory = tmp_path_factory.mktemp("ranks")
    with CompilerJobs(directory, cases="gpu_ranks", under="python", variables=variables) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def of_one_rank(jobs):
    """The report of one rank, over NCCL on CUDA."""
    store = (jobs.directory / "store-of-one").as_uri()
    return jobs.run("rank", "one_rank", {"store": store, "device": DEVICE}).report


def test_two_ranks_train_to_the_bits_of_dense_gradients_over_gloo(jobs):
    store = (jobs.directory / "store").as_uri()
    ranks = [
        jobs.start(
            f"rank-{number}", "ddp", {"number": number, "size": 2, "store": store, "device": DEVICE}
        )
        for number in range(2)
    ]
    first, second = (rank.finish().report for rank in ranks)
    assert first["sums"] == second["sums"]
    assert first["sparse"]
    assert first["aggregated"]


def test_captured_step_under_nccl_has_the_bits_of_ddp(of_one_rank):
    assert (of_one_rank["mode"], of_one_rank["reason"]) == ("traced", None)
    assert of_one_rank["traced"] == of_one_rank["plain"]


def test_sparse_gradients_over_nccl_have_the_bits_of_dense_ones(of_one_rank):
    assert of_one_rank["sparse"]


def test_updates_fused_with_nccl_use_the_learning_rate_of_their_step(of_one_rank):
    assert of_one_rank["fused"] == of_one_rank["unfused"]
