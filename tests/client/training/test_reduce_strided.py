"""Sums of tensors that are not contiguous: exact, and nothing beside them is written."""

from pathlib import Path

import pytest

from support.ranks import reports_of_ranks

JOB = Path(__file__).parents[2] / "support" / "strided_sums_job.py"


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    return reports_of_ranks(jobs, tmp_path_factory.mktemp("strided"), JOB, 2)


def test_sum_of_a_strided_tensor_is_exact_and_writes_nothing_else(reports):
    for report in reports:
        cases = {name: right for name, right in report.items() if isinstance(right, bool)}
        assert len(cases) == 2 * (5 * 3 * 2 + 1)
        assert [name for name, right in cases.items() if not right] == []


@pytest.mark.parametrize("kind", ["group", "through"])
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("expanded", "elements share one address"),
        ("transposed", "shape (10, 4): give one dimension"),
        ("sparse", "layout torch.sparse_coo: give a dense one"),
    ],
)
def test_tensors_without_a_sum_of_their_own_are_refused(reports, kind, case, cause):
    for report in reports:
        assert cause in report[f"{kind}, refused"][case]
