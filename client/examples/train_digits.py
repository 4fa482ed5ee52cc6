"""Trains a small CNN to read handwritten digits; above 97 % of the test images within a minute.

The data are scikit-learn's 1,797 images of 8x8 (UCI's "Optical Recognition of Handwritten Digits",
test part), which come with it, so there is nothing to download. Every fifth is kept for the test.

    python client/examples/train_digits.py --loop ours --device cpu
    python client/examples/train_digits.py --loop train --checkpoints runs/digits

`loops` tells what the first four loops are. With one seed and device, their losses agree to
rounding. The fifth is `graphstash.training.train`, which brings progress, evaluation and
checkpoints: stop it at any time, and the same command resumes.

Shapes: B batch, H height, W width.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))  # so under PYTHONSAFEPATH too

from loops import ARMS, OPTIMIZERS, PRECISIONS, Step, device_counts, make_step

__all__ = ["CNN", "Digits", "batches_of", "main"]

LEARNING_RATES = {"SGD": 0.05, "Adam": 2e-3, "AdamW": 2e-3}


class CNN(nn.Sequential):
    """Two convolutions and two linear layers; about 75,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The images, float32 [1, 8, 8] in [0, 1], and what they show, 0 to 9.

    Args:
        train: the training images, or those for the test.
    """

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 5 != 0) == train
        self.images_N1HW = torch.tensor(digits.images, dtype=torch.float32)[chosen, None] / 16
        self.labels_N = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images_N1HW[index], self.labels_N[index]


def batches_of(digits: Digits, *, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of the training images, shuffled in every epoch."""
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(digits, batch_size=size, shuffle=True, drop_last=True, generator=order)
    while True:
        yield from loader


def train(
    step: Step,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    steps: int,
    log_every: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains for `steps` steps, a multiple of `log_every`.

    Returns:
        The losses at the logging boundaries; steps per second, and what the device was asked for
        per step between boundaries, both after the first of them.
    """
    losses: list[float] = []
    seconds = 0.0
    asked_for = dict.fromkeys(device_counts(device), 0)
    compiles = 0
    for number in range(0, steps, log_every):
        before, started = device_counts(device), time.perf_counter()
        for _ in range(log_every):
            loss = step(*(part.to(device) for part in next(batches)))
        after = device_counts(device)
        losses.append(float(loss))
        print(f"step {number + log_every:4d}  loss {losses[-1]:.4f}")
        if number == 0:  # compiles, and makes the optimizer's state
            compiles = after.get("compiles", 0)
            continue
        seconds += time.perf_counter() - started
        for name in asked_for:
            asked_for[name] += after[name] - before[name]
    settled = steps - log_every
    return {
        "losses": losses,
        "steps_per_second": settled / seconds if settled else None,
        "per_step": {name: count / settled for name, count in asked_for.items() if settled},
        "compiles_at_first": compiles,
    }


def train_to_the_end(model: CNN, options: argparse.Namespace) -> dict[str, Any]:
    """Trains by `graphstash.training.train`; resumes where an earlier run stopped."""
    from graphstash import training

    digits, unseen = Digits(train=True), Digits(train=False)
    make_optimizer = getattr(training, options.optimizer)
    result = training.train(
        model,
        make_optimizer(model.parameters(), lr=learning_rate_of(options)),
        training.Batches((digits.images_N1HW, digits.labels_N), options.batch, seed=options.seed),
        steps=options.steps,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        precision=options.precision,
        log_every=options.log_every,
        evaluate=lambda model: {"accuracy": accuracy_of(model, unseen, device_of(model))},
        evaluate_every=4 * options.log_every,
        checkpoints=options.checkpoints,
        checkpoint_every=options.log_every,
    )
    made = len(result.losses)
    return {
        "losses": list(result.losses[options.log_every - 1 :: options.log_every]),
        "steps_per_second": made / result.seconds if made else None,
        "per_step": {},
        "resumed_from": result.resumed_from,
    }


@torch.no_grad()
def accuracy_of(model: nn.Module, digits: Digits, device: torch.device) -> float:
    """The part of the images that the model reads rightly."""
    answers_NK = model(digits.images_N1HW.to(device)).cpu()
    return (answers_NK.argmax(1) == digits.labels_N).float().mean().item()


def device_of(model: nn.Module) -> torch.device:
    """Where the model is."""
    return next(model.parameters()).device


def learning_rate_of(options: argparse.Namespace) -> float:
    """What was asked for, or what suits the optimizer."""
    rate: float = options.learning_rate or LEARNING_RATES[options.optimizer]
    return rate


def device_named(name: str) -> torch.device:
    """The device that `--device` means."""
    if name != "xla":
        return torch.device(name)
    import torch_xla

    return torch_xla.device()


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Train a CNN on scikit-learn's digits.")
    parser.add_argument("--loop", choices=(*ARMS, "train"), default="ours")
    parser.add_argument("--device", choices=("cpu", "xla", "cuda"), default="cpu")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--learning-rate", type=float, help="default: one that suits the optimizer")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--log-every", type=int, default=50, help="steps between reading losses")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the batches")
    parser.add_argument("--checkpoints", type=Path, help="with --loop train: directory of them")
    parser.add_argument("--report", type=Path, help="write what was measured here as JSON")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.log_every < 1 or options.steps % options.log_every:
        parser.error("--steps must be a positive multiple of --log-every")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Runs the job that the command line describes."""
    options = parse_options(arguments)
    torch.manual_seed(options.seed)
    device = device_named(options.device)
    model = CNN().to(device)
    if options.loop == "train":
        measured = train_to_the_end(model, options)
    else:
        step = make_step(
            options.loop,
            model,
            lambda images, labels: functional.cross_entropy(model(images), labels),
            optimizer=options.optimizer,
            learning_rate=learning_rate_of(options),
            precision=options.precision,
        )
        measured = train(
            step,
            batches_of(Digits(train=True), size=options.batch, seed=options.seed),
            steps=options.steps,
            log_every=options.log_every,
            device=device,
        )
    measured["accuracy"] = accuracy_of(model, Digits(train=False), device)
    print(f"accuracy {measured['accuracy']:.2%} of the test images")
    if measured["steps_per_second"]:
        after = "" if options.loop == "train" else f" after the first {options.log_every}"
        print(f"{measured['steps_per_second']:.1f} steps/s{after}")
    for name, count in measured["per_step"].items():
        print(f"{count:.2f} {name} per step")
    if options.report is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        report = {"settings": settings, **measured}
        options.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
