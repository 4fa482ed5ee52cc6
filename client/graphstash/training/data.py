"""Position: where a training stands in its data, whatever the data is.

Data that can tell it itself does: `Batches`, torchdata's StatefulDataLoader, anything with
`state_dict` and `load_state_dict`. For a DataLoader, and whatever else can be iterated over once
per epoch, the state of the random generators at the beginning of the epoch is kept; going on means
beginning that epoch once more and dropping the batches that were used. They are loaded for it: an
epoch that takes long is better given as `Batches`.

What cannot be brought back: generators that a dataset keeps to itself, and what persistent workers
draw after their first epoch.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self

import torch

from graphstash._errors import ConfigError
from graphstash.training.randomness import host_random_state, set_random_state

__all__ = ["Position"]

_WAY_OUT: Final = (
    "give Batches, a DataLoader, or an object whose __iter__ begins anew (or that has state_dict "
    "and load_state_dict)"
)


class Position:
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
        """Lets the epoch's iterator go, and what it holds: worker processes, files."""
        batches, self._batches = self._batches, None
        if batches is not self._data and (close := getattr(batches, "close", None)) is not None:
            close()

    def state_dict(self) -> dict[str, Any]:
        """What has been given: `batch` batches of epoch `epoch`.

        Call it in the thread that pulls, between two batches.

        Raises:
            ConfigError: the data cannot go back.
        """
        place = {"epoch": self._epoch, "batch": self._batch}
        if self._own is not None:
            return place | {"data": self._own.state_dict()}
        if isinstance(self._data, Iterator):
            raise ConfigError(
                f"the data is a {type(self._data).__name__}, which can be gone through only once: "
                f"its place cannot be saved in a checkpoint; {_WAY_OUT}, or train without "
                "checkpoints"
            )
        return place | {"start": self._start if self._batch else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to where a state dictionary was taken, before the first batch was asked for.

        Changes the state of the global random generators: set it afterwards.

        Raises:
            ConfigError: the state is that of other data.
        """
        if ("data" in state_dict) != (self._own is not None):
            raise ConfigError(
                f"the saved place is not one in a {type(self._data).__name__}: give the data that "
                "the checkpoint was made with, or begin anew in another directory"
            )
        self._epoch, self._batch = int(state_dict["epoch"]), int(state_dict["batch"])
        if self._own is not None:
            self._own.load_state_dict(state_dict["data"])
            if self._batch:
                self._batches = self._begin(None)  # what this draws was drawn long ago
        elif self._batch:
            self._batches = self._begin(state_dict["start"])
            for number in range(self._batch):
                if next(self._batches, self) is self:
                    raise ConfigError(
                        f"epoch {self._epoch} had {self._batch} batches or more when its place was "
                        f"saved and has {number} now: give the same data, or begin anew in another "
                        "directory"
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
            return (
                f"the data, a {kind}, has come to its end, and training has not: {_WAY_OUT}, or "
                "make fewer steps"
            )
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
