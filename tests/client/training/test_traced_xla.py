"""The traced step on torch_xla trains as the lazy step does, or is refused with the reason."""

import pytest

from support.run_case import RUN_CASE, case_arguments

pytestmark = pytest.mark.extended

TRACED = [
    *("sgd", "capturable", "own", "clipping", "clearing", "dropout and draws", "many shapes"),
    *("schedule", "rare schedule", "accumulating", "interrupted", "kept state dictionaries"),
    *(
        "replaced",
        "donation",
        "dropout repeats",
        "structures",
        "retracing",
        "failing",
        "one program",
    ),
]
REFUSED = [
    *("branching", "step number", "frequent schedule", "host step count", "outside state"),
    *("reading", "syncing", "scheduling", "batches", "eager"),
]


@pytest.fixture(scope="module")
def errors(jobs, tmp_path_factory):
    """Traceback of each check, or "". Two processes run all checks."""
    directory = tmp_path_factory.mktemp("traced")
    running = []
    for number in range(2):
        options = case_arguments("traced:checks", names=[*TRACED, *REFUSED][number::2])
        at = directory / str(number)
        running.append(jobs.start(at, *options, script=RUN_CASE, under=""))
    return {name: error for job in running for name, error in job.finish().report.items()}


@pytest.mark.parametrize("check", TRACED)
def test_traced_steps_train_as_lazy_steps(errors, check):
    assert not errors[check], errors[check]


@pytest.mark.parametrize("check", REFUSED)
def test_unfreezable_step_is_refused_with_reason_and_runs_lazily(errors, check):
    assert not errors[check], errors[check]


@pytest.mark.parametrize("look_up", ["exact", "hint"])
def test_step_traced_on_one_host_is_not_compiled_on_another(
    jobs, server, namespace, tmp_path, look_up
):
    settings = {"url": server.url, "namespace": namespace, "torch_xla_mode": look_up}
    options = case_arguments("traced:share")
    cold, warm = (
        jobs.start(tmp_path / host, *options, script=RUN_CASE, **settings).finish()
        for host in ("a", "b")
    )
    # Two steps: the first, which creates the optimizer's state, and all others. The third program
    # is part of the model's upload.
    assert sum(compiles for compiles, _, _ in cold.report["counts"]) == 2
    assert cold.stats["published"] == cold.report["uncached"] == 3
    assert warm.report["uncached"] == 0
    assert warm.hits == 3
    assert warm.report["losses"] == cold.report["losses"]
    assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
