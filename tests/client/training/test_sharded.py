"""Parameters that two processes share (FSDP2) are updated as whole ones are."""

from pathlib import Path

import pytest
import torch

from support.ranks import reports_of_ranks

JOB = Path(__file__).parents[2] / "support" / "sharded_job.py"


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    return reports_of_ranks(jobs, tmp_path_factory.mktemp("sharded"), JOB, 2)


def test_every_optimizer_updates_shards_as_whole_parameters(reports):
    assert len(reports[0]["cases"]) == 7 * 2 * 3
    for report in reports:
        for name, case in report["cases"].items():
            for pair in zip(case["sharded"], case["whole"], strict=True):
                sharded, whole = map(torch.tensor, pair)
                torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-6, msg=name)


def test_inf_in_the_shard_of_one_process_makes_all_leave_out_the_step(reports):
    for report in reports:
        for name, case in report["cases"].items():
            expected = [0.0, 0.0, float("True" in name), 0.0, 0.0]
            assert case["skipped"] == [expected, expected], name


@pytest.mark.parametrize("number", [0, 1], ids=["ours", "torch's"])
def test_a_sharded_run_resumes_exactly(reports, number):
    for report in reports:
        case = report["resumed"][number]
        assert case["whole"]["kind"] == "DTensor"
        assert case["rest"]["losses"] == case["whole"]["losses"][3:]
        assert case["rest"]["values"] == case["whole"]["values"]


@pytest.mark.parametrize("number", [0, 1], ids=["ours", "torch's"])
def test_a_checkpoint_of_a_sharded_model_fits_a_whole_one(reports, number):
    for report in reports:
        case = report["resumed"][number]
        assert case["saved"] == case["whole"]["values"]


def test_a_sharded_tensor_that_nobody_has_gathered_is_refused(reports):
    for report in reports:
        assert "call full_tensor() in every process" in report["refused"]


def test_a_shard_of_a_matrix_is_refused_by_muon(reports):
    for report in reports:
        assert "a parameter is sharded: put it into a group" in report["refused by Muon"]


@pytest.mark.parametrize("name", ["Adafactor", "ScheduleFreeAdamW", "Adam8bit"])
def test_shards_are_refused_by_what_needs_whole_parameters(reports, name):
    for report in reports:
        assert "a parameter is sharded" in report["refused by"][name]
        assert "use Adam" in report["refused by"][name]


def test_a_shard_of_a_matrix_is_refused_by_shampoo_and_soap(reports):
    for report in reports:
        assert report["refused with roots"] == [
            f"{name} needs whole matrices, and a parameter is sharded; use LAMB or AdamW"
            for name in ("Shampoo", "SOAP")
        ]
