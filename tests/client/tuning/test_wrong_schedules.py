"""A schedule that is right only on its first call, or by accident, is never chosen."""

import ctypes

import numpy as np
import pytest

from graphstash import tuning
from graphstash.tuning.measuring import Budget, Measurement, Method, Pool
from graphstash.tuning.memory import journal
from graphstash.tuning.memory.findings import Finding, merge
from graphstash.tuning.memory.journal import Journal
from graphstash.tuning.tuner import search
from graphstash_schema import DeviceType
from support import wrong_kernels

QUICK = Method(samples=2, sample_seconds=1e-6)


PROBLEM = tuning.Problem("sums", (3,), "float64", DeviceType("cpu"), "made-up 1.0")


def failures(found):
    return {each.configuration["does"]: each.failure for each in found}


EXPECTED = {
    "scribbles": "wrong",
    "right": None,
    "right, slowly": None,
    "leaves": "wrong",
    "adds": "wrong",
    "memoizes": "wrong",
}


def test_result_is_checked_after_the_last_sample():
    with Pool(wrong_kernels.target(), method=QUICK) as pool:
        for does in EXPECTED:
            pool.submit({"does": does})
        found = []
        while pool.pending:
            found += pool.results()
        assert failures(found) == EXPECTED


@pytest.mark.parametrize(
    ("check", "outcomes"),
    [
        ({"renew": None}, {"memoizes": None}),  # passes only if the inputs stay
        ({"renew": None}, {"right": None, "leaves": "wrong"}),  # in memory of the right result
        ({"is_right": print}, {"right": "run"}),  # returns None: an error, and no wrong result
    ],
)
def test_check_decides_by_each_result_with_its_inputs(check, outcomes):
    with Pool(wrong_kernels.target(**check), method=QUICK) as pool:
        assert failures(pool.compare([{"does": does} for does in outcomes])) == outcomes


def test_wrong_schedules_lose_despite_fast_costs_of_peers():
    known = [
        Measurement.of({"does": does}, [0.5 if failure else 2.0])
        for does, failure in EXPECTED.items()
    ]
    result = search(
        tuning.make_searcher("exhaustive", wrong_kernels.SPACE),
        wrong_kernels.target(),
        budget=Budget(measurements=6),
        method=QUICK,
        finalists=2,  # all are wrong in the first rounds
        known=known,
    )
    assert result.best == ("right",)


# --- findings of several hosts about one configuration


def test_a_wrong_result_on_one_host_outweighs_costs_of_others():
    wrong = Finding((1,), None, failure="wrong")
    works = Finding((1,), 1.0, count=5)
    for batches in ([[works], [wrong]], [[wrong], [works, works]]):
        assert merge(batches)[(1,)].failure == "wrong"
    assert merge([[works], [Finding((1,), None, failure="crash")]])[(1,)].cost == 1.0


def test_stored_answers_with_fewer_checks_have_another_key():
    request = PROBLEM.request(wrong_kernels.SPACE, "answer", 0, max_bytes=1)
    assert request.parts["checks"] == "after the last sample"


# --- outputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int64", "complex64"])
def test_output_holds_what_was_written(dtype):
    output = tuning.CheckedOutput((2, 3), dtype)
    expected = np.arange(6).reshape(2, 3).astype(dtype)
    assert not output.holds(expected)
    output.array[...] = expected
    assert output.holds(expected)
    output.fill_with_garbage()
    assert not output.holds(expected)


def test_missing_element_fails_the_check():
    output = tuning.CheckedOutput((4,), "float32")
    output.array[:3] = 0
    assert not output.holds(np.zeros(4))


@pytest.mark.parametrize("value", [False, True])
def test_missing_bools_fail_the_check(value):
    assert not tuning.CheckedOutput((64,), "bool").holds(np.full(64, value))


def test_sum_onto_uninitialized_memory_fails_the_check():
    output = tuning.CheckedOutput((4,), "float32")
    output.array += 1
    assert not output.holds(np.ones(4), tolerance=1e-3)


@pytest.mark.parametrize("place", [-1, 4], ids=["before", "after"])
def test_write_beside_the_output_fails_the_check(place):
    output = tuning.CheckedOutput((4,), "float32")
    output.array[...] = 0
    ctypes.memset(output.array.ctypes.data + 4 * place, 0, 4)
    assert not output.holds(np.zeros(4))


def test_nan_and_infinity_equal_only_themselves():
    output = tuning.CheckedOutput((3,), "float32")
    output.array[...] = [np.nan, np.inf, -np.inf]
    assert output.holds(np.array([np.nan, np.inf, -np.inf]), tolerance=1)
    assert not output.holds(np.array([0, np.inf, -np.inf]), tolerance=1)
    assert not output.holds(np.array([np.nan, -np.inf, -np.inf]), tolerance=1)
    assert not output.holds(np.array([np.nan, np.inf, 0]), tolerance=1)


@pytest.mark.parametrize("here", [7, -np.inf, np.nan])
def test_infinite_tolerance_for_infinity_accepts_nothing_else(here):
    output = tuning.CheckedOutput((2,), "float32")
    expected = np.array([np.inf, 1])
    output.array[...] = [here, 1.001]
    assert not output.holds(expected, tolerance=0.01 * abs(expected))
    output.array[0] = np.inf
    assert output.holds(expected, tolerance=0.01 * abs(expected))


@pytest.mark.parametrize(
    ("dtype", "here", "expected", "tolerance"),
    [
        *(("uint8", 0, 255, 1), ("int8", 127, -128, 1), ("int64", 2**60, 1, 1)),
        ("int64", 2**60 + 1, 2**60, 0),  # equal as floating-point numbers
    ],
)
def test_integers_are_compared_exactly_and_without_wrapping_around(
    dtype, here, expected, tolerance
):
    output = tuning.CheckedOutput((1,), dtype)
    output.array[...] = here
    assert not output.holds(np.array([expected], dtype), tolerance=tolerance)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected shape is \(2,\), but that of the output"):
        tuning.CheckedOutput((1,), "int64").holds(np.zeros(2))


LATER = Finding((2,), 2.0, count=5)


@pytest.mark.parametrize("failure", ["wrong", "run", "crash"])
@pytest.mark.parametrize("has_failed", [True, False], ids=["in its round", "once more"])
def test_finalist_that_fails_in_final_round_or_recheck_is_not_chosen(
    failure, has_failed, monkeypatch
):
    monkeypatch.setattr(journal, "_BATCH_SECONDS", 3600)  # there is no cache
    fails = Finding((1,), None, failure=failure)

    def measure(configurations):
        return [LATER if has_failed or each == (2,) else fails for each in configurations]

    own = Journal(None, PROBLEM, wrong_kernels.SPACE, measure)
    for each in (Finding((1,), 1.0, count=5), LATER, *[fails] * has_failed):
        own.add(each)
    found = own.find_best({}, confirm=True)
    assert [each.configuration for each in found] == [(2,)]
