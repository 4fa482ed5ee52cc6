"""Calls of one kernel that are different problems."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from graphstash.tuning.targets import triton as target
from graphstash_schema import DeviceType


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(target, "_device_type", lambda: DeviceType("cuda-sm_90"))


@triton.jit
def add(x, y, n, stride, BLOCK: tl.constexpr):  # noqa: N803 - Triton's convention
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * stride, mask=at < n), mask=at < n)


def problem(x, y, n=64, stride=1):
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
    tuned = target.autotune(configs=configs, key=["n"], do_bench=lambda *_: None)(add)
    tuned.nargs = {"x": x, "y": y, "n": n, "stride": stride}
    return tuned._make_problem({})


SQUARE = torch.zeros(64, 64)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": SQUARE.T},
        {"x": torch.zeros(64, 128)[:, ::2]},
        {"x": torch.zeros(64, 65)[:, :64]},
        {"x": torch.zeros(1, 64).expand(64, 64)},
        {"x": torch.zeros(64 * 64 + 1)[1:].view(64, 64)},
        {"stride": 2},
        {"stride": 16},
    ],
    ids=["transposed", "every second", "odd rows", "expanded", "odd address", "two", "sixteen"],
)
def test_arguments_compiled_differently_are_different_problems(changed):
    given = {"x": SQUARE, "y": SQUARE}
    assert problem(**given) == problem(**given)
    assert problem(**given | changed).parts != problem(**given).parts


@pytest.mark.parametrize(
    "changed", [{"x": torch.zeros(128, 128)}, {"x": torch.zeros(64, 64)}, {"n": 128}]
)
def test_other_sizes_alone_change_no_part(changed):
    given = {"x": SQUARE, "y": SQUARE}
    assert problem(**given | changed).parts == problem(**given).parts


def test_products_that_torch_verifies_are_not_shared(monkeypatch):
    from torch._inductor import select_algorithm

    from graphstash.tuning.targets import inductor

    about = ["mm", [], SimpleNamespace(), None, None]
    assert inductor._is_shared(about, {})
    monkeypatch.setattr(select_algorithm, "VERIFY", {"atol": 1e-3})
    assert not inductor._is_shared(about, {})
