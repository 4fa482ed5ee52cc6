"""The optimizers on torch_xla: torch's numbers, one graph for all steps, and no device read."""

import pytest

from support.optimizer_cases import ON_XLA
from support.run_case import RUN_CASE, case_arguments

pytestmark = pytest.mark.extended

CHECKS = [
    "every_schedule_on_one_graph",
    "clipping_by_norm_and_by_value",
    "clipping_on_the_host_is_torchs",
    "state_is_written_over_in_place",
    "aliases_of_parameters_follow",
    "torch_goes_on_from_ours_and_ours_from_torch",
    "the_scalers_of_torch_and_torch_xla",
    "other_types_are_kept",
    "muon_rounds_as_bfloat16_does",
    "moments_of_eight_bits_are_rounded_as_on_the_host",
    "averages_are_put_in_and_taken_out",
    "optimizers_that_compute_beside_the_steps_are_refused",
]


@pytest.fixture(scope="module")
def errors(jobs, tmp_path_factory):
    """Traceback of each check, or "". Two processes run all checks."""
    directory = tmp_path_factory.mktemp("optimizers")
    running = []
    for number, names in enumerate((CHECKS, list(ON_XLA))):
        options = case_arguments("optimizers_xla:checks", names=names)
        at = directory / str(number)
        running.append(jobs.start(at, *options, script=RUN_CASE, under=""))
    return {name: error for job in running for name, error in job.finish().report.items()}


@pytest.mark.parametrize("name", ON_XLA)
def test_run_equals_torch_with_skipped_steps_in_one_graph(errors, name):
    assert not errors[name], errors[name]


@pytest.mark.parametrize("check", CHECKS)
def test_optimizer_guarantees_hold_on_torch_xla(errors, check):
    assert not errors[check], errors[check]
