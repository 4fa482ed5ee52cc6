"""Optimizers beside implementations that share no code with torch's, or that .venv lacks."""

import math

import pytest

from support.run_case import RUN_CASE, case_arguments

pytestmark = pytest.mark.extended  # an environment of its own


@pytest.fixture
def run(jobs, tmp_path):
    options = {"script": RUN_CASE, "environment": "references", "under": "python"}

    def run(function):
        call = case_arguments(f"references:{function}")
        return jobs.start(tmp_path, *call, **options).finish().report

    return run


def test_steps_equal_those_of_optax(run):
    """After 12 steps of 0.05. Optax computes 1 - beta^t in float32, which loses digits early."""
    differences = run("in_optax")
    assert len(differences) == 8
    assert {name: each for name, each in differences.items() if not each <= 1e-5} == {}


def test_steps_of_muon_equal_those_of_torch(run):
    assert all(each <= 1e-6 for each in run("in_torch").values())


def test_steps_with_8_bits_are_as_near_to_32_bits_as_those_of_bitsandbytes(run):
    """The two round to different tables, so their parameters differ by both roundings."""
    for each in run("in_bitsandbytes").values():
        assert all(math.isfinite(number) for number in each.values())
        assert each["ours - wide"] <= 1.5 * each["theirs - wide"]
        assert each["ours - theirs"] <= each["ours - wide"] + each["theirs - wide"]
        assert each["ours - wide"] <= each["moved"] / 20
