"""DataPosition: where a training run stands in its data, and in its random numbers.

Data that can report its position does: `Batches`, torchdata's StatefulDataLoader, anything with
`state_dict` and `load_state_dict`. For a DataLoader, and anything else that can be iterated over
once per epoch, the state of the random generators at the beginning of the epoch is kept; resuming
means starting that epoch again and dropping the batches that were used. They are loaded for that,
so `Batches` suits long epochs better.

Generators that a dataset keeps to itself cannot be restored, nor can what persistent workers draw
after their first epoch.

Nothing here reads a device: the generators of CUDA and torch_xla have their state on the host. The
torch_xla generator starts again with every step, from a seed of its own; its state is complete if
nothing was drawn since the last `torch_xla.sync()`.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self

import torch
from torch.utils import _pytree as pytree

from graphstash.errors import ConfigError

__all__ = ["DataPosition", "host_random_state", "random_state", "set_random_state"]

_REMEDY: Final = (
    "give Batches, a DataLoader, or an object whose __iter__ starts again (or that has state_dict "
    "and load_state_dict)"
)


class DataPosition:
    """An endless iterator over data, epoch after epoch, that knows where it is.

    Samplers that have `set_epoch` are told each epoch's number, from 0.

    Args:
        data: gives an epoch's batches each time it is iterated over. An iterator serves too, as
            long as it lasts, but has no position that could be saved.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._own: Any = data if _has_state(data) else None
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self._batch = 0
        self._start: dict[str, Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            ConfigError: an epoch has no batch.
        """
        while True:
            if self._batches is None:
                self._batches = self._begin(None)
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                if self._batch == 0:
                    raise ConfigError(self._why_empty()) from None
                self._epoch, self._batch = self._epoch + 1, 0
            else:
                self._batch += 1
                return batch

    def close(self) -> None:
        """Closes the epoch's iterator with its worker processes and files."""
        batches, self._batches = self._batches, None
        if batches is not self._data and (close := getattr(batches, "close", None)) is not None:
            close()

    def state_dict(self) -> dict[str, Any]:
        """What has been given: `batch` batches of epoch `epoch`.

        Call it in the thread that pulls, between two batches.

        Raises:
            ConfigError: the data can be iterated over only once.
        """
        place = {"epoch": self._epoch, "batch": self._batch}
        if self._own is not None:
            return place | {"data": self._own.state_dict()}
        if isinstance(self._data, Iterator):
            raise ConfigError(
                f"the data is a {type(self._data).__name__}, which can be iterated over only once: "
                f"its position cannot be saved in a checkpoint; {_REMEDY}, or train without "
                "checkpoints"
            )
        return place | {"start": self._start if self._batch else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the position of a state dictionary; call it before the first batch is requested.

        Changes the state of the global random generators: set it afterwards.

        Raises:
            ConfigError: the state belongs to other data.
        """
        if ("data" in state_dict) != (self._own is not None):
            raise ConfigError(
                f"the saved position does not fit {type(self._data).__name__}: give the data that "
                "the checkpoint was made with, or start again in an empty directory"
            )
        self._epoch, self._batch = int(state_dict["epoch"]), int(state_dict["batch"])
        if self._own is not None:
            self._own.load_state_dict(state_dict["data"])
            if self._batch:
                self._batches = self._begin(None)  # what this draws was drawn before
        elif self._batch:
            self._batches = self._begin(state_dict["start"])
            for number in range(self._batch):
                if next(self._batches, self) is self:
                    raise ConfigError(
                        f"epoch {self._epoch} had {self._batch} batches or more when its position "
                        f"was saved and has {number} now: give the same data, or start again in "
                        "an empty directory"
                    )

    def _begin(self, start: dict[str, Any] | None) -> Iterator[Any]:
        """Begins an epoch, with the random generators as they are or as they were."""
        parts = _parts(self._data)
        generators = _generators(parts)
        if start is not None:
            if self._epoch and getattr(self._data, "persistent_workers", False):
                iter(self._data)  # starting the workers draws a number, and they were there already
            set_random_state(start["host"])
            for generator, state in zip(generators, start["own"], strict=True):
                generator.set_state(state)
        elif self._own is None:
            start = {"host": host_random_state(), "own": [g.get_state() for g in generators]}
        self._start = start
        for part in parts:
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self._epoch)
        return iter(self._data)

    def _why_empty(self) -> str:
        kind = type(self._data).__name__
        if isinstance(self._data, Iterator) and self._epoch:
            return f"the data, a {kind}, ended before the training: {_REMEDY}, or use fewer steps"
        return (
            f"epoch {self._epoch} of the data, a {kind}, has no batch: is it empty, or smaller "
            "than a batch with drop_last?"
        )


def _has_state(data: object) -> bool:
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def _parts(data: object) -> list[object]:
    """The data, and the objects of a DataLoader that decide about its order; each once."""
    batch_sampler = getattr(data, "batch_sampler", None)
    parts = [data, getattr(data, "dataset", None), getattr(data, "sampler", None)]
    parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if part is not None}.values())


def _generators(parts: list[object]) -> list[torch.Generator]:
    """The random generators of their own, each once."""
    found = (getattr(part, "generator", None) for part in parts)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def random_state(device: torch.device | str) -> dict[str, Any]:
    """The state of all generators that training may draw from, of plain types.

    Those of the host, those of all CUDA devices that this process sees, if it uses any of them,
    and on torch_xla that of `device`. Call it where a step has ended.
    """
    state = host_random_state()
    device = torch.device(device)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        state["torch_xla"] = xm.get_rng_state(str(device))
    return state


def host_random_state() -> dict[str, Any]:
    """The state of the generators that data is drawn with: Python's, torch's, and NumPy's."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words), gauss),
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = pytree.tree_map_only(
            numpy.ndarray,
            lambda a: torch.from_numpy(a.copy()),
            numpy.random.get_state(legacy=False),
        )
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Restores a state of `random_state` or `host_random_state`.

    The torch_xla generator is that of `device`, which may have another number than it had.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(  # noqa: NPY002 - the user draws from it, not we
            pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), state["numpy"])
        )
    device = torch.device(device)
    if "cuda" in state and torch.cuda.is_available():
        for number, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, number)
    if "torch_xla" in state and device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["torch_xla"], str(device))
