import pytest
import torch

from graphstash.training.loop.training_step import DeviceLog
from graphstash.training.optimizers.base import DeviceScalars

CPU = torch.device("cpu")


def get(scalars, group=0, dtype=torch.float32, **values):
    return scalars.get(group, values, CPU, dtype)


def test_tensors_come_in_the_order_of_the_values():
    assert [float(t) for t in get(DeviceScalars(), lr=0.5, momentum=0.25)] == [0.5, 0.25]


def test_a_changed_value_changes_the_same_tensor():
    scalars = DeviceScalars()
    (first,) = get(scalars, lr=0.5)
    (second,) = get(scalars, lr=0.25)
    assert first is second
    assert float(first) == 0.25


def test_change_of_host_tensor_is_detected():
    scalars, lr = DeviceScalars(), torch.tensor(0.5)
    (tensor,) = get(scalars, lr=lr)
    lr.fill_(0.25)
    get(scalars, lr=lr)
    assert float(tensor) == 0.25


def test_a_tensor_on_a_device_is_refused():
    with pytest.raises(ValueError, match="give a number"):
        get(DeviceScalars(), lr=torch.tensor(0.5, device="meta"))


def test_groups_and_dtypes_have_tensors_of_their_own():
    scalars = DeviceScalars()
    (narrow,) = get(scalars, lr=0.1)
    (wide,) = get(scalars, lr=0.1, dtype=torch.float64)
    (other,) = get(scalars, group=1, lr=0.5)
    assert (float(wide), float(other)) == (0.1, 0.5)
    assert narrow.dtype == torch.float32
    assert list(scalars) == [narrow, wide, other]


def test_refresh_changes_every_tensor_of_a_group_and_no_other():
    scalars = DeviceScalars()
    (narrow,) = get(scalars, lr=0.5)
    (wide,) = get(scalars, lr=0.5, dtype=torch.float64)
    (other,) = get(scalars, group=1, lr=0.5)
    scalars.refresh(0, {"lr": 0.25})
    assert [float(t) for t in (narrow, wide, other)] == [0.25, 0.25, 0.5]


def test_logged_values_are_float32_under_any_default_dtype():
    loss = torch.tensor(1.001)
    torch.set_default_dtype(torch.bfloat16)
    try:
        log = DeviceLog(["loss"], 1, CPU)
        log.append({"loss": loss})
    finally:
        torch.set_default_dtype(torch.float32)

    assert log.read(1) == [{"loss": float(loss)}]
