"""Scalars on the device: the options of optimizers, and the log of a training run."""

import pytest
import torch

from graphstash.training.loop.training_step import DeviceLog
from graphstash.training.optimizers.scalars import DeviceScalars

CPU = torch.device("cpu")


def get(scalars, group=0, dtype=torch.float32, **values):
    return scalars.get(group, values, CPU, dtype)


def test_a_tensor_on_a_device_is_refused():
    with pytest.raises(ValueError, match="give a number"):
        get(DeviceScalars(), lr=torch.tensor(0.5, device="meta"))


def test_change_on_the_host_reaches_the_same_tensors_of_its_group_alone():
    scalars = DeviceScalars()
    tensors = [
        *get(scalars, lr=0.1, momentum=0.5),
        *get(scalars, lr=0.1, momentum=0.5, dtype=torch.float64),
        *get(scalars, group=1, lr=0.5),
    ]
    assert [float(each) for each in tensors[2:]] == [0.1, 0.5, 0.5]
    get(scalars, lr=0.25, momentum=0.5)
    assert [float(each) for each in tensors] == [0.25, 0.5, 0.1, 0.5, 0.5]
    scalars.refresh(0, {"lr": 0.75, "momentum": 0.5})
    assert [float(each) for each in scalars] == [0.75, 0.5, 0.75, 0.5, 0.5]
    assert all(one is other for one, other in zip(scalars, tensors, strict=True))


def test_logged_values_are_float32_under_any_default_dtype():
    loss = torch.tensor(1.001)
    torch.set_default_dtype(torch.bfloat16)
    try:
        log = DeviceLog(["loss"], 1, CPU)
        log.append({"loss": loss})
    finally:
        torch.set_default_dtype(torch.float32)

    assert log.read(1) == [{"loss": float(loss)}]
