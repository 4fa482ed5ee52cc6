"""The traced step on torch_xla: many scenarios, each against the same training step by step.

They run in two processes that report numbers (`tests/support/traced_job.py`). A difference is the
largest one of all losses, parameters, buffers and gradients after 25 steps, relative to their size.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parents[2] / "support" / "traced_job.py"
ROUNDING = 2e-5  # float32; two graphs of one function are not rounded alike
STEPS = 25
ONE_EXECUTION = [0, 1, 0]  # compiles, executions, reads


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    directory = tmp_path_factory.mktemp("traced")
    running = [
        jobs.start(directory / str(part), "--part", part, script=SCRIPT, under="")
        for part in range(2)
    ]
    return {name: report for job in running for name, report in job.finish().report.items()}


@pytest.fixture
def report(reports):
    def get(name):
        assert "error" not in reports[name], reports[name]["error"]
        return reports[name]

    return get


@pytest.mark.parametrize("name", ["sgd", "own", "capturable", "undonated", "clipping"])
def test_training_is_the_same_as_step_by_step(report, name):
    assert report(name)["mode"] == "traced"
    assert report(name)["difference"] < ROUNDING


@pytest.mark.parametrize("name", ["clearing", "clearing and dropout"])
def test_where_both_are_the_same_graph_they_are_equal_bit_for_bit(report, name):
    """Gradients that are cleared in the step are no outputs of either graph."""
    assert report(name)["mode"] == "traced"
    assert report(name)["difference"] == 0


@pytest.mark.parametrize("name", ["sgd", "own", "clearing and dropout"])
def test_the_function_runs_three_times_and_each_later_step_is_one_execution(report, name):
    assert report(name)["calls"] == 3
    assert report(name)["counts"][3:] == [ONE_EXECUTION] * (STEPS - 3)


def test_recording_compiles_one_graph(report):
    assert sum(compiles for compiles, _, _ in report("clearing")["counts"][1:]) == 1


def test_no_warning_is_given_without_a_reason(report):
    assert report("sgd")["warnings"] == []
    assert report("sgd")["reason"] is None


def test_state_is_overwritten_in_place_if_donated_and_only_then(report):
    assert report("donation")["True"]["aliases"] == report("donation")["True"]["state"]
    assert report("donation")["False"]["aliases"] == 0


def test_each_shape_of_batch_gets_a_graph(report):
    shapes = report("two shapes")
    assert shapes["mode"] == "traced"
    assert shapes["calls"] == 5
    assert shapes["counts"][6:] == [ONE_EXECUTION] * (STEPS - 6)
    assert shapes["difference"] < ROUNDING


def test_there_is_a_bound_on_structures_and_the_first_ones_stay_traced(report):
    shapes = report("many shapes")
    assert sorted(shapes["last_modes"]) == ["lazy", "traced", "traced", "traced"]
    assert len(shapes["warnings"]) == 1
    assert "more than 3 structures" in shapes["warnings"][0]
    assert shapes["difference"] < ROUNDING


def test_a_new_learning_rate_reaches_the_graph(report):
    schedule = report("schedule")
    assert schedule["calls"] == 3
    assert schedule["counts"][3:] == [ONE_EXECUTION] * (STEPS - 3)
    assert schedule["difference"] < ROUNDING


def test_an_optimizer_with_numbers_on_the_host_is_recorded_again_when_one_changes(report):
    schedule = report("rare schedule")
    assert schedule["mode"] == "traced"
    assert schedule["calls"] == 3 + 2 * 2  # the rate changes twice
    assert sum(compiles for compiles, _, _ in schedule["counts"][3:]) == 0
    assert schedule["difference"] < ROUNDING


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("branching", ["graph differs from one step to the next"]),
        ("step number", ["1.25 in one step and 1.125 in the next", "tensor on the device"]),
        ("frequent schedule", ["-0.0405", "-0.03644", "optimizers of graphstash.training"]),
        ("host step count", ["on the host and changed from 2 to 3", "capturable=True"]),
        ("outside state", ["not in `state` (1: float32[])"]),
        ("reading", ["reads the device (item in ", "traced_job.py:"]),
        ("syncing", ["makes the device compute before the step is complete"]),
        ("scheduling", ["changes an option of an optimizer"]),
    ],
)
def test_what_cannot_be_frozen_is_refused_with_the_reason_and_trained_all_the_same(
    report, name, words
):
    refused = report(name)
    assert refused["mode"] == "lazy"
    assert refused["calls"] == STEPS
    assert refused["difference"] < ROUNDING
    assert len(refused["warnings"]) == 1
    assert all(word in refused["reason"] for word in words)
    assert refused["warnings"] == [f"running the training step untraced: {refused['reason']}"]


def test_a_batch_that_cannot_be_followed_is_refused(report):
    mode, reason = report("batches")["object"]
    assert mode == "lazy"
    assert "object is in the batch" in reason
    mode, reason = report("batches")["host tensor"]
    assert mode == "lazy"
    assert "move it to the device" in reason


def test_eager_mode_is_refused(report):
    assert report("eager") == {
        "mode": "lazy",
        "reason": "torch_xla runs in eager mode; use torch_xla.compile",
    }


@pytest.mark.parametrize("name", ["interrupted", "interrupted own"])
def test_whatever_happens_between_steps_is_seen(report, name):
    """Evaluation, changes in place and of a view, state dictionaries, unread results, clones."""
    assert report(name)["mode"] == "traced"
    assert report(name)["difference"] < ROUNDING


def test_a_network_that_copies_parameters_keeps_its_own(report):
    assert report("target")["mode"] == "traced"
    assert report("target")["difference"] < ROUNDING


def test_gradients_may_add_up_over_steps(report):
    """The first step after clearing has no gradient to add to: a graph of its own."""
    accumulating = report("accumulating")
    assert accumulating["mode"] == "traced"
    assert accumulating["difference"] < ROUNDING


def test_a_state_dictionary_that_is_kept_shows_the_parameters_as_they_are(report):
    aliases = report("aliases")
    assert aliases["sgd before"]
    assert aliases["sgd during"]
    assert aliases["own during"]


def test_random_numbers_go_on_where_others_were_drawn_between_steps(report):
    assert report("dropout and draws")["mode"] == "traced"
    assert report("dropout and draws")["difference"] < ROUNDING


def test_each_step_has_its_random_numbers_and_a_random_state_repeats_them(report):
    assert report("dropout repeats") == {"mode": "traced", "distinct": 8, "repeated": True}


def test_results_keep_their_form(report):
    structures = report("structures")
    assert structures["mode"] == "traced"
    total = 4.0
    for number, row in enumerate(structures["rows"]):
        total += 4 * number
        assert row == [total, total / 2, None, 5, True, total, 6.0]


def test_a_python_value_is_taken_as_it_was_until_the_step_is_traced_again(report):
    assert report("retracing") == {
        "before": [1, 2, 3, 4, 5],
        "stale": 6,
        "after": [16, 26, 36, 46],
        "modes": ["recording", "recording", "traced", "traced"],
    }


def test_an_error_of_the_function_is_raised_and_training_goes_on(report):
    failing = report("failing")
    assert failing["raised"] == "a bad batch"
    assert failing["mode"] == "traced"
    assert failing["difference"] < ROUNDING


def test_gradients_and_updates_are_one_program_and_fuse_says_so(report):
    one = report("one program")
    assert one["mode"] == "traced"
    assert one["counts"][-1] == ONE_EXECUTION
    assert one["programs"]
    for program in one["programs"]:
        assert program["modules"] == 1
        # Of two layers: two forward, the gradients of both weights and of what is between them.
        assert program["dots before the update"] == 5
        assert program["results"] >= 5  # the parameters
    assert len(one["refused"]) == 2
    for text in one["refused"]:
        assert "on xla:0, where the compiler fuses the update by itself" in text
        assert "instead of fuse()" in text


@pytest.mark.parametrize("look_up", ["exact", "hint"])
def test_what_one_host_has_traced_another_does_not_compile(
    jobs, server, namespace, tmp_path, look_up
):
    settings = {"url": server.url, "namespace": namespace, "torch_xla_mode": look_up}
    cold, warm = (
        jobs.start(tmp_path / host, "--share", script=SCRIPT, **settings).finish()
        for host in ("a", "b")
    )
    assert cold.report["mode"] == warm.report["mode"] == "traced"
    # The step that makes the optimizer's state, and all others; what the model's upload computes.
    assert sum(compiles for compiles, _, _ in cold.report["counts"]) == 2
    assert cold.stats["published"] == cold.report["uncached"] == 3
    assert warm.report["uncached"] == 0
    assert warm.hits == 3
    assert warm.report["losses"] == cold.report["losses"]
    assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
