"""Contents of spaces, moves between configurations, and refused descriptions."""

import json
import math
import random
import sys
import traceback
from contextlib import nullcontext
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash.tuning.memory.findings import read
from graphstash.tuning.space import EmptySpaceError, SpaceError
from graphstash.tuning.spaces import (
    GemmSpace,
    ParameterSpace,
    TableSpace,
    from_description,
    parameters,
)
from graphstash.tuning.spaces.constraints import Constraint

TILES = {
    "MWG": [16, 32, 64],
    "MDIMC": [8, 16],
    "VWM": [1, 2, 4, 8],
    "NWG": [16, 32, 64],
    "order": ["row", "column"],
}
DIVIDES = "MWG % (MDIMC * VWM) == 0"


@st.composite
def spaces(draw):
    kind = draw(st.sampled_from(["gemm", "parameters", "table"]))
    if kind == "gemm":
        dimensions = [draw(st.sampled_from([1, 2, 3, 4, 8, 12])) for _ in range(3)]
        return GemmSpace(*dimensions, factors=tuple(draw(st.tuples(*[st.integers(1, 3)] * 3))))
    names = "abcd"[: draw(st.integers(1, 4))]
    values = {name: draw(st.lists(st.integers(0, 5), min_size=1, unique=True)) for name in names}
    if kind == "table":
        rows = draw(st.lists(st.sampled_from(list(product(*values.values()))), min_size=1))
        return TableSpace(names, set(rows))
    limit = draw(st.integers(0, 6))
    constraints = [f"{names[0]} * {names[-1]} <= {limit}", f"{names[0]} % 3 != 1"]
    try:
        return ParameterSpace(values, constraints)
    except EmptySpaceError:
        return ParameterSpace(values)


@given(spaces())
def test_a_space_lists_each_of_its_configurations_once(space):
    listed = list(space)
    assert len(listed) == len(set(listed)) == space.size
    assert all(each in space for each in listed)
    assert space.start in listed


@given(spaces())
def test_moves_stay_in_the_space_and_are_reversible(space):
    for configuration in list(space)[:50]:
        for neighbour in space.neighbours(configuration):
            assert neighbour in space
            assert neighbour != configuration
            assert configuration in space.neighbours(neighbour)


@given(spaces())
def test_space_round_trips_through_json(space):
    again = from_description(json.loads(json.dumps(space.describe())))
    assert again.describe() == space.describe()
    assert list(again) == list(space)
    assert again.start == space.start
    assert [again.neighbours(each) for each in again] == [space.neighbours(each) for each in space]


@given(spaces())
def test_continuations_count_configurations_with_that_prefix(space):
    listed = list(space)
    for configuration in listed[:20]:
        for length in range(len(configuration)):
            prefix = configuration[:length]
            below = [each[length] for each in listed if each[:length] == prefix]
            assert dict(space.continuations(prefix)) == {v: below.count(v) for v in set(below)}


@given(spaces(), st.integers())
def test_features_distinguish_configurations(space, seed):
    a, b = (space.draw(random.Random(seed + i)) for i in range(2))
    assert (list(space.features(a)) == list(space.features(b))) == (a == b)
    assert all(-1 <= each <= 1 for each in space.features(a))


@pytest.mark.parametrize(
    "space",
    [
        GemmSpace(4, 2, 4, factors=(2, 2, 2)),
        ParameterSpace(TILES, [DIVIDES, "NWG >= MWG"]),
        TableSpace("ab", [(1, 2), (1, 3), (2, 2), (5, 1)]),
    ],
    ids=["gemm", "parameters", "table"],
)
def test_draws_are_uniform(space):
    """Pearson's chi-squared test with a fixed seed. One run in 100,000 would exceed the bound."""
    rng = random.Random(7)
    expected = 200
    counts = dict.fromkeys(space, 0)
    for _ in range(expected * space.size):
        counts[space.draw(rng)] += 1
    freedom = space.size - 1
    squares = sum((count - expected) ** 2 / expected for count in counts.values())
    assert squares < freedom + 4.3 * math.sqrt(2 * freedom) + 12


# --- GEMM


@pytest.mark.parametrize(("length", "size"), [(32, 18_816), (64, 49_392), (1024, 899_756)])
def test_the_lattice_has_the_size_that_the_paper_gives(length, size):
    assert GemmSpace(length, length, length).size == size


def test_the_lattice_has_26_moves_and_7_are_legal_from_the_untiled_start():
    space = GemmSpace(512, 512, 512)
    assert space.moves == 26
    assert space.start == (512, 1, 1, 1, 512, 1, 512, 1, 1, 1)
    assert len(space.neighbours(space.start)) == 7


def test_a_move_doubles_one_factor_and_halves_another_of_the_same_loop():
    space = GemmSpace(8, 2, 1, factors=(2, 2, 1))
    assert space.names == ("m_0", "m_1", "k_0", "k_1", "n_0")
    assert space.neighbours((4, 2, 2, 1, 1)) == [(8, 1, 2, 1, 1), (2, 4, 2, 1, 1), (4, 2, 1, 2, 1)]


def test_every_state_of_the_lattice_is_reached_by_moves():
    space = GemmSpace(8, 12, 4, factors=(3, 2, 2))
    reached, edge = {space.start}, [space.start]
    while edge:
        new = {each for state in edge for each in space.neighbours(state)} - reached
        reached |= new
        edge = list(new)
    assert reached == set(space)


def test_an_odd_part_stays_in_the_outermost_factor():
    space = GemmSpace(12, 7, 1, factors=(2, 2, 1))
    assert sorted(space) == [(3, 4, 7, 1, 1), (6, 2, 7, 1, 1), (12, 1, 7, 1, 1)]
    assert (4, 3, 7, 1, 1) not in space


@pytest.mark.parametrize("length", [0, -4, 2.0, "32", True, 2**41, None])
def test_invalid_dimension_is_refused(length):
    with pytest.raises(SpaceError, match=r"k is .*from 1 to"):
        GemmSpace(32, length, 32)


@pytest.mark.parametrize("factors", [(4, 2), (0, 2, 4), (4, 2.0, 4), (4, 2, 17)])
def test_invalid_numbers_of_factors_are_refused(factors):
    with pytest.raises(SpaceError, match="factors is"):
        GemmSpace(32, 32, 32, factors=factors)


# --- Parameters and constraints


def test_constraint_excludes_violating_configurations():
    space = ParameterSpace(TILES, [DIVIDES])
    wanted = [each for each in product(*TILES.values()) if each[0] % (each[1] * each[2]) == 0]
    assert list(space) == wanted


def test_moves_are_one_step_in_a_list_or_a_swap_of_two_values():
    space = ParameterSpace({"a": [1, 2, 4], "b": [1, 2, 4], "c": [0, 1]}, ["a * b <= 8"])
    assert space.moves == 7
    assert space.neighbours((2, 4, 0)) == [(1, 4, 0), (2, 2, 0), (2, 4, 1), (4, 2, 0)]


def test_space_is_counted_without_enumeration():
    values = {f"p{i}": list(range(10)) for i in range(60)}
    space = ParameterSpace(values, [f"p{i} != p{i + 1}" for i in range(0, 60, 2)])
    assert space.size == 90**30
    assert space.draw(random.Random(0)) in space


def test_contradiction_names_conflicting_constraints():
    with pytest.raises(EmptySpaceError, match=r"without one of \['a > 2'\]"):
        ParameterSpace({"a": [1, 2], "b": [1]}, ["a > 2", "b == 1"])
    with pytest.raises(EmptySpaceError, match="contradict"):
        ParameterSpace({"a": [1, 2]}, ["a > 2", "a < 1"])


@pytest.mark.parametrize(
    ("parameters", "constraints", "message"),
    [
        ({"a": [1, 1]}, [], "are equal"),
        ({"a": [1, True]}, [], "are equal"),
        ({"a": [math.nan]}, [], "finite"),
        ({"a": [[1]]}, [], "cannot be a value"),
        ({"a": "xy"}, [], "must be a list"),
        ({"a b": [1]}, [], "cannot be the name"),
        ({"a": [1]}, "a == 1", "must be a list of texts"),
        ({"a": [1]}, ["b == 1"], r"\['b'\]"),
        ({"a": ["x"]}, ["a < 1"], "fails for"),
    ],
)
def test_invalid_space_is_refused(parameters, constraints, message):
    with pytest.raises(SpaceError, match=message):
        ParameterSpace(parameters, constraints)


@pytest.mark.parametrize("parameters", [{}, {"a": []}])
def test_an_empty_space_has_its_own_error(parameters):
    with pytest.raises(EmptySpaceError, match=r"0 parameters|a has no values"):
        ParameterSpace(parameters)


def test_true_and_1_are_different_values():
    assert (True,) not in ParameterSpace({"a": [1, 2]})
    assert (1,) not in ParameterSpace({"a": [True, False]})


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a + b * 2 == 7", True),
        ("a - b == -2 and not b < 3", True),
        ("a < b <= 3", True),
        ("b // 2 == 1 or a / 0 == 1", True),
        ("a % (b - 3) == 0", False),
        ("a in (1, 2) and b not in [4]", True),
        ("order == 'row'", True),
    ],
)
def test_a_constraint_computes_as_python_does(text, holds):
    assert Constraint(text).holds({"a": 1, "b": 3, "order": "row"}) is holds


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('true')", "a.__class__", "a[0]", "lambda: a", "(a := 3)"),
        *("[a for a in (1,)]", "a ** 9 ** 9", "a << 9", "f'{a}'", "a if a else 1", "a is 1"),
        *("a in b", "(a, 1)", "a ==", "", "1 == 1", "a; a", "a == None", "a == 1j", "a == b'x'"),
        *("(" * 400 + "a" + ")" * 400, "-" * 999 + "a", "a" * 1001, "a\0", "~a", "await a"),
    ],
    ids=range(26),
)
def test_invalid_constraint_is_refused(text):
    with pytest.raises(SpaceError, match="the constraint"):
        Constraint(text)


def test_constraint_cannot_multiply_strings():
    with pytest.raises(SpaceError, match="not a number"):
        Constraint("a * 999999999999 == 'x'").holds({"a": "x"})


# --- Tables


def test_table_moves_go_to_next_value_if_row_exists():
    space = TableSpace("ab", [(16, 1), (32, 1), (128, 1), (32, 2), (128, 4)])
    assert space.neighbours((32, 1)) == [(16, 1), (128, 1), (32, 2)]
    assert space.neighbours((128, 4)) == []


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], EmptySpaceError, "no rows"),
        ([(1, 2), (1, 2)], SpaceError, "twice"),
        ([(1, 2), (1,)], SpaceError, "row 1"),
        ([(1, [2])], SpaceError, "cannot be a value"),
        ([(1, "x"), (True, "y")], SpaceError, "two values of a are equal"),
        ([(1, "x"), (1.0, "y")], SpaceError, "two values of a are equal"),
    ],
)
def test_invalid_table_is_refused(rows, error, message):
    with pytest.raises(error, match=message):
        TableSpace("ab", rows)


# --- Descriptions


@pytest.mark.parametrize(
    "description",
    [
        *(None, [], {}, {"space": "spiral"}, {"space": "gemm", "m": 2, "k": 2, "n": 2}),
        {"space": "gemm", "m": 2, "k": 2, "n": 2, "factors": 4},
        {"space": "parameters", "parameters": [{"values": [1]}], "constraints": []},
        {"space": "parameters", "parameters": [{"name": "a", "values": [1]}], "constraints": [1]},
        {"space": "table", "names": ["a"], "rows": [[1]], "more": 1},
        {"space": "table", "names": ["a"], "rows": [1]},
        {"space": {}, "names": ["a"]},
    ],
    ids=range(11),
)
def test_invalid_description_of_space_is_refused(description):
    with pytest.raises(SpaceError):
        from_description(description)


def test_named_values_become_a_configuration_and_back():
    space = ParameterSpace(TILES, [DIVIDES])
    named = space.named(space.start)
    assert space.configuration(named) == space.start
    with pytest.raises(SpaceError, match="not those of the space"):
        space.configuration({"MWG": 16})
    with pytest.raises(SpaceError, match="not in the space"):
        space.configuration(named | {"MWG": 17})


@pytest.mark.parametrize(
    ("values", "given", "is_its"),
    [
        ([0.5, 1, 2], 1, True),
        ([0.5, 1, 2], 0.5, True),
        ([0.5, 1, 2], 1.0, False),
        (["auto", 8], 8, True),
        (["auto", 8], "auto", True),
        (["auto", 8], 8.0, False),
        ([False, 4], 4, True),
    ],
)
def test_a_finding_has_the_types_of_its_parameters_values(values, given, is_its):
    space = ParameterSpace({"a": values})
    record = {"configuration": {"a": given}, "cost": 1, "spread": 0, "count": 1, "failure": None}
    with nullcontext() if is_its else pytest.raises(ValueError, match="types"):
        (found,) = read(json.dumps({"measurements": [record]}).encode(), space)
        assert found.configuration == (given,)


@pytest.fixture
def small_limits(monkeypatch):
    """Divide the counting limits by 100, because reaching them takes seconds."""
    monkeypatch.setattr(parameters, "MAX_PREFIXES", parameters.MAX_PREFIXES // 100)
    monkeypatch.setattr(parameters, "MAX_TRIED", tried := parameters.MAX_TRIED // 100)
    monkeypatch.setitem(parameters._PrefixCounter.__init__.__kwdefaults__, "most_tried", tried)


@pytest.mark.usefixtures("small_limits")
def test_contradiction_is_reported_even_if_space_is_uncountable():
    values = {"x": [1]} | {f"p{i}": list(range(20)) for i in range(6)}
    with pytest.raises(EmptySpaceError, match="no configuration satisfies"):
        ParameterSpace(values, ["x > 1", "p0 * p1 * p2 + p3 * p4 * p5 == 7"])


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((60, 60, 1), "in more than 2000 ways.* TableSpace"),
        ((200, 200), "more than 10000 combinations"),
    ],
)
def test_space_that_takes_long_to_count_is_refused(sizes, message):
    names = "abc"[: len(sizes)]
    values = {name: list(range(size)) for name, size in zip(names, sizes, strict=True)}
    with pytest.raises(SpaceError, match=message):
        ParameterSpace(values, [" + ".join(names) + " != -1"])


def test_a_condition_that_is_too_deep_to_compute_has_its_own_error():
    constraint = Constraint("a == " + 400 * "-" + "1")

    def at_depth(calls):
        return at_depth(calls - 1) if calls else constraint.holds({"a": 1})

    here = sum(1 for _ in traceback.walk_stack(None))
    with pytest.raises(SpaceError, match="recursion"):
        at_depth(sys.getrecursionlimit() - here - 200)
