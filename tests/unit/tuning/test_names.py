"""The public names of graphstash.tuning."""

import numpy as np
import pytest

from graphstash import tuning
from graphstash_schema import DeviceType
from support.processes import python


def test_importing_it_loads_neither_numpy_nor_xgboost_nor_a_compiler():
    heavy = ("numpy", "xgboost", "torch", "jax", "triton", "graphstash.tuning.space")
    python(f"import sys, graphstash.tuning; assert not {{*{heavy}}} & {{*sys.modules}}", check=True)


def test_shapes_of_a_bucket_are_one_problem():
    shapes = [(65, 4096), (100, 4096), (128, 4096)]
    assert {tuning.shape_bucket(shape) for shape in shapes} == {(128, 4096)}
    assert tuning.shape_bucket((129, 1, 0)) == (256, 1, 0)


def problem(*shape):
    return tuning.Problem("matmul", shape, "float32", DeviceType("cpu"), "made-up 1.0")


@pytest.mark.parametrize("size", [64.0, True, "64", None, -1, 2**63], ids=repr)
def test_size_that_is_no_integer_is_refused(size):
    with pytest.raises(ValueError, match="at most 16 sizes, whole numbers from 0"):
        problem(size)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": {"version": 2}}, "the part 'version' of the problem is 2: parts must be texts"),
        ({"parts": {2: "version"}}, "the part 2 of the problem is 'version': parts must be texts"),
        ({"compiler": None}, "the compiler None cannot be used"),
    ],
)
def test_part_that_is_no_text_is_refused(options, words):
    usual = {"compiler": "made-up 1.0"}
    with pytest.raises(ValueError, match=words):
        tuning.Problem("matmul", (64,), "float32", DeviceType("cpu"), **usual | options)


def test_size_can_be_a_numpy_integer():
    assert problem(np.int64(64)).label == problem(64).label
