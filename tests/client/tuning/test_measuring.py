"""Real processes measure configurations; they crash, hang and report false costs."""

import json
import math
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from graphstash.tuning.measuring import Budget, Measurement, MeasuringError, Method, Pool
from graphstash.tuning.measuring.process import MeasuringProcess
from graphstash.tuning.targets.callable import CallableTarget
from support import trials
from support.processes import is_running
from support.waiting import until

GOOD = {"does": "nothing bad"}
BESIDE_THE_CACHE = {"does": "is beside the cache"}


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


def target(**options):
    return CallableTarget(trials.build, name="trials", is_right=trials.is_one, **options)


def costing(cost):
    return CallableTarget(trials.numbered, name="numbered", cost=cost)


def test_slow_finalists_have_time_for_all_samples_that_they_may_take():
    most = Method(trial_seconds=600, timeout_seconds=10).most_seconds
    assert most(5) == 5 * (3 * 10 + 600 + 10)
    # A long trial has a limited number of samples.
    many = Method(trial_seconds=1e6, samples=5, final_samples=20, timeout_seconds=10)
    assert many.most_seconds(2) == 2 * (3 + 20) * 10


def unhurried(**options):
    """Return a method that takes all samples, however busy the machine is."""
    return Method(trial_seconds=1e6, **options)


def measure(pool, *configurations):
    for configuration in configurations:
        pool.submit(configuration)
    found = []
    while pool.pending:
        found += pool.results()
    return found


def failures(found):
    return [measurement.failure for measurement in found]


def test_values_can_be_numpy_numbers():
    given = {"x": np.int64(36), "a": np.float32(0.5), "b": np.bool_(1), "c": np.str_("c")}
    with Pool(costing(trials.costs_its_distance), method=Method(samples=1)) as pool:
        (submitted,) = measure(pool, given)
        (compared,) = pool.compare([given])
    assert submitted == compared == Measurement.of({"x": 36, "a": 0.5, "b": True, "c": "c"}, [2.0])
    assert [type(each) for each in submitted.configuration.values()] == [int, float, bool, str]


# --- statistics


def test_cost_is_the_median_of_samples_and_a_single_one_has_no_spread():
    found = Measurement.of({"x": 1}, [2.0, 1000.0, 1.0, 3.0, 1e-9])
    assert found == Measurement({"x": 1}, cost=2.0, spread=2.0, count=5, failure=None)
    assert Measurement.of({"x": 1}, [2]) == Measurement({"x": 1}, 2.0, 0.0, 1, None)


@pytest.mark.parametrize(
    "measurement",
    [
        Measurement.of({"block": 16, "order": "mnk", "unroll": True, "share": 0.5}, [1.0, 2.0]),
        Measurement.failed({}, "compile"),
    ],
)
def test_a_measurement_is_json(measurement):
    document = json.loads(json.dumps(measurement.to_json(), allow_nan=False))
    assert sorted(document) == ["configuration", "cost", "count", "failure", "spread"]
    assert Measurement.from_json(document) == measurement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": None}, "cost is None"),
        ({"cost": math.nan}, "cost is nan"),
        ({"cost": math.inf}, "cost is inf"),
        ({"cost": 0}, "cost is 0"),
        ({"cost": -1}, "cost is -1"),
        ({"cost": 1e308}, r"cost is 1e\+308"),
        ({"cost": 10**400}, "cost is 1000"),
        ({"cost": "1"}, "cost is '1'"),
        ({"cost": True}, "cost is True"),
        ({"spread": math.nan}, "spread is nan"),
        ({"spread": None}, "spread is None"),
        ({"spread": 10**400}, "spread is 1000"),
        ({"count": 0}, "count is 0"),
        ({"count": 1.0}, "count is 1.0"),
        ({"count": True}, "count is True"),
        ({"count": 10**6 + 1}, "count is 1000001"),
        ({"failure": "bad luck"}, "failure is 'bad luck'"),
        ({"failure": "x" * 33}, "failure is 'xxx"),
        ({"failure": []}, r"failure is \[\]"),
        ({"failure": "crash"}, "failed, but has a cost"),
        ({"configuration": [1]}, r"configuration is \[1\]"),
        ({"configuration": {"x": [1]}}, "must map names to plain values"),
        ({"configuration": {"x": math.nan}}, "must map names to plain values"),
        ({"configuration": {1: 1}}, "must map names to plain values"),
        ({"more": 1}, "has the fields configuration, cost"),
    ],
)
def test_malformed_measurement_is_refused(change, message):
    document = Measurement.of({"x": 1}, [1.0]).to_json()
    with pytest.raises(ValueError, match=message):
        Measurement.from_json(document | change)


@pytest.mark.parametrize(
    "make",
    [
        Budget,
        lambda: Budget(measurements=0),
        lambda: Budget(seconds=0),
        lambda: Budget(seconds=math.nan),
        lambda: Method(samples=0),
        lambda: Method(samples=1001),
        lambda: Method(final_samples=0),
        lambda: Method(samples=1.5),
        lambda: Method(timeout_seconds=math.inf),
        lambda: Method(trial_seconds=0),
        lambda: Method(sample_seconds=math.nan),
        lambda: Method(memory_bytes=0),
        lambda: Method(memory_bytes=1e9),
        lambda: Budget(measurements=math.nan),
        lambda: Budget(measurements=1.5),
        lambda: Pool(target(), workers=0),
    ],
)
def test_numbers_that_are_too_small_are_refused(make):
    with pytest.raises(ValueError, match=r"must be|needs"):
        make()


# --- failing trials


@pytest.fixture(scope="module")
def pool():
    """A pool of one process, which failing and working trials share."""
    with Pool(target(), method=Method(timeout_seconds=20, memory_bytes=2**34)) as pool:
        yield pool


@pytest.mark.parametrize(
    "bad",
    [
        {
            "does not compile": "compile",
            "aborts while it builds": "crash",
            "raises": "run",
            "is wrong": "wrong",
            "takes all memory": "memory",
            "reads address zero": "crash",
            "kills itself": "crash",
            "writes into every descriptor": "crash",
        },
        extended(
            {
                "exits while it builds": "compile",
                "builds nothing": "compile",
                "exits": "run",
                "overwrites the heap": "crash",
                "aborts": "crash",
                "leaves with status 0": "crash",
                "kills its session": "crash",
                "overflows the stack": "crash",
                "closes every descriptor": "crash",
            }
        ),
    ],
    ids=["usual", "rare"],
)
def test_failures_are_named_and_affect_no_other_trial(pool, bad):
    *found, last = failures(measure(pool, GOOD, *({"does": does} for does in bad), GOOD))
    assert dict(zip(["nothing bad", *bad], found, strict=True)) == {"nothing bad": None} | bad
    assert last is None


@pytest.mark.extended
def test_a_trial_that_hangs_is_killed():
    hangs = [{"does": does} for does in ("hangs while it builds", "hangs", "stops itself")]
    with Pool(target(), method=Method(timeout_seconds=2)) as pool:
        assert failures(measure(pool, *hangs, GOOD)) == ["timeout"] * 3 + [None]


def test_error_of_slow_start_names_the_limit_of_a_start(monkeypatch):
    monkeypatch.setattr("graphstash.tuning.measuring.pool._START_SECONDS", 0.0)
    with Pool(target()) as pool, pytest.raises(MeasuringError, match=r"took more than 0\.0 s"):
        measure(pool, GOOD)


def test_invalid_cost_is_a_failure_and_process_continues():
    good = [{"says": says} for says in ("right", "of numpy")]
    bad = [{"says": says} for says in trials._COSTS if {"says": says} not in good]
    with Pool(costing(trials.costs_what_it_says), method=unhurried()) as pool:
        assert measure(pool, *bad) == [Measurement.failed(each, "cost") for each in bad]
        assert measure(pool, *good) == [Measurement(each, 1.5, 0.0, 5, None) for each in good]


def test_a_trial_runs_where_the_search_was_started_and_beside_the_cache(tmp_path, monkeypatch):
    """Another trial may change the directory. Files there are not imported."""
    (tmp_path / "kernel.c").touch()
    (tmp_path / "json.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # an entry that is not a string
    monkeypatch.setenv("GRAPHSTASH_ENABLED", "true")
    reads = {"does": "reads a file beside it", "beside": "kernel.c"}
    with Pool(target()) as pool:
        found = measure(pool, {"does": "leaves its directory"}, reads, BESIDE_THE_CACHE)
    assert failures(found) == [None, None, None]


def test_output_of_trial_is_no_result(pool, capfd):
    (found,) = measure(pool, {"does": "prints"})
    assert found.failure is None
    assert "garbage" not in "".join(capfd.readouterr())


def test_start_of_stderr_of_trial_is_shown(capfd):
    with Pool(target()) as pool:
        assert failures(measure(pool, {"does": "shouts"}, GOOD)) == [None, None]
    errors = capfd.readouterr().err
    assert errors.startswith("trouble trouble ")
    assert len(errors) < 2**17
    assert errors.endswith("[what else a measuring process writes is left out]\n")


def test_exit_of_forked_child_is_no_failure(pool):
    forks = ({"does": f"forks a child that {ends}"} for ends in ("exits", "returns"))
    assert failures(measure(pool, *forks, GOOD)) == [None, None, None]


def test_trial_is_not_failed_by_an_earlier_one(pool):
    trials_ = [
        each
        for by in ("crash", "wrong")
        for each in ({"does": "poisons its process"}, {"does": "fails when poisoned", "by": by})
    ]
    assert failures(measure(pool, *trials_)) == [None] * 4


@pytest.mark.parametrize(("then", "failure"), [("crashes", "crash"), ("hangs", "timeout")])
def test_no_process_that_a_trial_started_outlives_it(tmp_path, then, failure):
    """The trial hangs in C without releasing the interpreter's lock."""
    file = tmp_path / "pids"
    trial = {"does": "leaves processes behind", "file": str(file), "then": then}
    method = Method(timeout_seconds=3 if then == "hangs" else 100)
    with Pool(target(), method=method) as pool:
        assert failures(measure(pool, trial)) == [failure]
        assert running(file) == []


@pytest.mark.parametrize(("times", "failure"), [(1, None), (2, "crash")])
def test_trial_whose_guard_is_killed_is_repeated_once(pool, tmp_path, times, failure):
    file = tmp_path / "pids"
    trial = {"does": "kills its guard", "file": str(file), "times": times}
    assert failures(measure(pool, trial)) == [failure]
    until(lambda: running(file) == [])


# --- the pool


def test_processes_end_with_the_process_that_started_them(tmp_path):
    file = tmp_path / "pids"
    program = f"""
        from graphstash.tuning.measuring import Method, Pool
        from graphstash.tuning.targets.callable import CallableTarget
        from support import trials

        if __name__ == "__main__":
            method = Method(timeout_seconds=1000)
            with Pool(CallableTarget(trials.build, name="trials"), method=method) as pool:
                pool.submit({{
                    "does": "leaves processes behind", "file": {str(file)!r}, "then": "hangs",
                }})
                pool.results()
    """
    with start(tmp_path, program) as job:
        until(lambda: file.exists() and len(running(file)) == 4)
        job.kill()
    until(lambda: running(file) == [])


@pytest.mark.parametrize(
    ("condition", "printed"),
    [('__name__ == "__main__"', "None\n"), ("True", 'under `if __name__ == "__main__":`')],
    ids=["guarded", "searches on import"],
)
def test_functions_of_a_script_are_measured_if_importing_it_does_not_search(
    tmp_path, condition, printed
):
    program = f"""
        from graphstash.tuning.measuring import MeasuringError, Pool
        from graphstash.tuning.targets.callable import CallableTarget

        def build(configuration):
            return lambda: configuration["x"]

        if {condition}:
            with Pool(CallableTarget(build, name="of a script")) as pool:
                pool.submit({{"x": 1}})
                try:
                    print(pool.results()[0].failure)
                except MeasuringError as error:
                    print(error)
    """
    with start(tmp_path, program) as job:
        assert printed in job.communicate()[0]


def test_failed_preparation_of_target_ends_the_search():
    with Pool(trials.Unprepared(trials.build, name="trials")) as pool:
        pool.submit(GOOD)
        with pytest.raises(MeasuringError, match=r"measured here: .* No module named 'compiler'"):
            pool.results()


def test_last_message_of_a_process_that_ends_is_received(monkeypatch):
    unprepared = pickle.dumps(trials.Unprepared(trials.build, name="trials"))
    process = MeasuringProcess(unprepared, Method())
    try:
        has_ended = process._has_ended
        monkeypatch.setattr(process, "_has_ended", lambda: until(has_ended) or True)
        assert "compiler" in str(process.receive())
    finally:
        process.end()


def test_a_target_that_cannot_be_pickled_is_refused():
    with pytest.raises(MeasuringError, match="at the top level of a module"):
        Pool(CallableTarget(lambda _: int, name="a lambda"))


def test_several_processes_build_side_by_side(tmp_path):
    found = []
    with Pool(target(), workers=2) as pool:
        for x in range(2):
            pool.submit({"does": "meets another build", "folder": str(tmp_path), "x": x})
        while pool.pending:
            found += pool.results()
    assert failures(found) == [None, None]


def test_several_processes_run_one_at_a_time(tmp_path):
    log = tmp_path / "log"
    with Pool(costing(trials.logged_cost), workers=2, method=unhurried()) as pool:
        found = measure(pool, *({"x": x, "log": str(log)} for x in range(1, 5)))
    assert sorted(measurement.cost for measurement in found) == [1, 2, 3, 4]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 4 * 2 * (1 + Method().samples)
    for (x, begins), (y, ends) in zip(lines[::2], lines[1::2], strict=True):
        assert (x, begins, ends) == (y, "begins", "ends")


def test_finalists_are_measured_in_turns(tmp_path):
    log = tmp_path / "log"
    configurations = [{"x": x, "log": str(log)} for x in (3, 1, 2)]
    with Pool(costing(trials.logged_cost), method=unhurried(samples=4)) as pool:
        found = pool.compare(configurations)
    assert [(each.cost, each.count) for each in found] == [(3, 8), (1, 8), (2, 8)]
    order = [line.split()[0] for line in log.read_text().splitlines()[::2]]
    assert "".join(order) == "312" + 4 * "312213"  # the warm-up first


def test_failing_finalists_are_left_out_of_the_comparison(pool):
    pair = [GOOD, {"does": "aborts"}, {"does": "is wrong"}]
    assert failures(pool.compare(pair)) == [None, "crash", "wrong"]
    assert pool.compare([]) == []


def test_comparison_runs_alone(pool):
    pool.submit(GOOD)
    with pytest.raises(RuntimeError, match="1 configurations are pending"):
        pool.compare([GOOD])
    assert failures(pool.results()) == [None]


@pytest.mark.extended
def test_the_largest_comparison_fits_into_messages():
    configurations = [{"says": "right", "as": f"{x:0500}"} for x in range(64)]
    with Pool(costing(trials.costs_what_it_says), method=unhurried(samples=1000)) as pool:
        found = pool.compare(configurations)
    assert [each.configuration for each in found] == configurations
    assert {(each.cost, each.count) for each in found} == {(1.5, 1000)}


def test_configurations_may_be_longer_than_a_packet(pool):
    long = [{"does": "x" * 70_000, "number": number} for number in range(8)]
    assert failures(pool.compare(long)) == [None] * 8


def test_without_a_working_directory_nothing_is_measured(pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    pool.close()
    with (
        Pool(target()) as here,
        pytest.raises(MeasuringError, match="working directory still there"),
    ):
        measure(here, GOOD)


def test_a_slow_configuration_is_measured_once_and_a_quick_one_often_for_a_sample(tmp_path):
    slow, quick = Method(trial_seconds=1e-9), Method(sample_seconds=10)
    with Pool(costing(trials.logged_cost), method=slow) as pool:
        (found,) = measure(pool, {"x": 1, "log": str(tmp_path / "log")})
    assert found.count == 1
    with Pool(costing(trials.calls_of), method=quick) as pool:
        (found,) = measure(pool, {"x": 1})
    assert found.cost > 100


def running(file):
    """Return the numbers in the file that belong to running processes."""
    return [pid for pid in file.read_text().split() if is_running(pid)]


def start(tmp_path, program):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.Popen(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
