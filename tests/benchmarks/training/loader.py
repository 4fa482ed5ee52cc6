"""The executor with a real loader: digits, collated one by one, against steps of the CNN.

    inline     load, upload, train, one after the other
    threaded   a DeviceLoader loads and uploads ahead, a DeviceExecutor trains

Both end a step when the device has; what is compared is whether the host's half is hidden.
"""

import itertools
import time
from collections import deque

import torch
from loops import make_step
from torch.nn import functional
from train_digits import CNN, Digits, batches_of

from graphstash.training import DeviceExecutor, DeviceLoader, to_device

__all__ = ["TABLE", "measure"]

TABLE = "The digits' loader, and steps of the CNN: ms per step"
STEPS = 40
BATCH = 128
DEPTH = 2


def measure(device, rounds, figures):
    """Adds the table of one device."""
    ways = ways_to_train(device)
    for _ in range(rounds):
        taken = {name: milliseconds_per_step(way) for name, way in ways.items()}
        slower = max(taken["loading"], taken["training"])
        for name, value in taken.items():
            figures.add(TABLE, device.type, name, value)
        for name in ("inline", "threaded"):
            figures.add(TABLE, device.type, f"{name} / slower half", taken[name] / slower)


def ways_to_train(device):
    """Functions that do STEPS steps, or one half of them; what they compile is compiled."""
    step = make_finished_step(device)
    digits = Digits(train=True)

    def some_batches():
        return itertools.islice(batches_of(digits, size=BATCH, seed=0), STEPS)

    def upload(batch):
        return to_device(batch, device)

    ready = upload(next(some_batches()))

    def load_only():
        deque(map(upload, some_batches()), maxlen=0)

    def train_only():
        for _ in range(STEPS):
            step(*ready)

    def inline():
        for batch in some_batches():
            step(*upload(batch))

    def threaded():
        with (
            DeviceLoader(some_batches(), upload=upload) as loader,
            DeviceExecutor(depth=DEPTH) as executor,
        ):
            for batch in loader:
                executor.submit(step, *batch)

    threaded()
    return {"loading": load_only, "training": train_only, "inline": inline, "threaded": threaded}


def make_finished_step(device):
    """A step of the CNN that returns when the device is done."""
    torch.manual_seed(0)
    model = CNN().to(device)
    step = make_step(
        "ours",
        model,
        lambda images, labels: functional.cross_entropy(model(images), labels),
        optimizer="SGD",
        learning_rate=0.01,
    )

    def finished(*batch):
        step(*batch)
        wait_for(device)

    return finished


def wait_for(device):
    if device.type == "xla":
        from torch_xla.core import xla_model

        xla_model.wait_device_ops()
    elif device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds_per_step(way):
    began = time.perf_counter()
    way()
    return 1000 * (time.perf_counter() - began) / STEPS
