# ruff: noqa: NPY002 - users draw from the global generator of NumPy
import random

import numpy as np
import pytest
import torch

from graphstash.training.data.position import host_random_state, random_state, set_random_state


def draw():
    """Of every generator, and of both forms that keep a second number for later."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    ]


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("take", [host_random_state, lambda: random_state("cpu")])
def test_restored_state_repeats_the_numbers(before, take):
    for _ in range(before):
        draw()
    state = take()
    first = [draw(), draw()]
    draw()
    set_random_state(state)
    assert [draw(), draw()] == first


@pytest.fixture
def other_bit_generator():
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    yield
    np.random.set_bit_generator(mine)


@pytest.mark.usefixtures("other_bit_generator")
def test_numpy_may_use_another_bit_generator(tmp_path):
    torch.save(host_random_state(), tmp_path / "state.pt")
    first = draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first


def test_taking_the_state_draws_nothing():
    state = host_random_state()
    first = draw()
    set_random_state(state)
    random_state("cpu")
    assert draw() == first


def test_state_of_another_device_is_skipped():
    state = random_state("cpu") | {"torch_xla": 5}
    first = draw()
    set_random_state(state, "cpu")
    assert draw() == first
