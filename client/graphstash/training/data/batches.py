"""Batches: endless shuffled batches that resume at any position without reading earlier batches."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from graphstash.errors import ConfigError

__all__ = ["Batches", "Dataset"]

_Sample_co = TypeVar("_Sample_co", covariant=True)

_MUST_EQUAL: Final = ("samples", "global_batch_size", "shuffle", "drop_last")


class Dataset(Protocol[_Sample_co]):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> _Sample_co: ...


class Batches:
    """An endless iterator over batches, in a different order each epoch.

    Only the seed and the epoch determine the order. So resuming from a state dictionary reads no
    earlier batch, and the state of the global random generators does not change.

        Batches((images, labels), 32)          # tuples of 32 images and 32 labels
        Batches(dataset, 32)                   # collates 32 samples, like a DataLoader

    Each process of a job takes its part of every global batch: `world` processes with batches of
    `batch_size` make the same steps as one process with batches of `world * batch_size`.

    Args:
        data: a tensor; a tuple of tensors with equal first dimensions; or a map-style dataset.
        batch_size: samples in a batch of this process, 1 or more.
        seed: seed of the order.
        shuffle: shuffle each epoch. False: every epoch has the order of the dataset.
        drop_last: drop the last samples of an epoch if they do not fill a global batch. False: they
            form a smaller batch. If they do not divide equally among the processes, samples from
            the start of the epoch fill it up.
        collate: makes a batch of a list of a dataset's samples. Default: torch's `default_collate`.
        rank: number of this process, from 0.
        world: number of processes.

    Raises:
        ConfigError: an argument is out of its range, or an epoch would have no batch.
    """

    def __init__(
        self,
        data: Tensor | tuple[Tensor, ...] | Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1 (got {batch_size})")
        if not 0 <= rank < world:
            raise ConfigError(f"rank must be from 0 to {world - 1} (got {rank})")
        self._source = (data, collate)
        self._take, self._samples = _source(data, collate)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._rank = rank
        self.world = world
        self._epoch = 0
        self._batch = 0
        self._order: tuple[int, int, Tensor] | None = None
        if len(self) == 0:
            raise ConfigError(
                f"{self._samples} samples do not fill a batch of {batch_size * world}; use smaller "
                "batches" + (", or drop_last=False" if self._samples else " and more samples")
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        size = self._batch_size * self.world
        return self._samples // size if self._drop_last else -(-self._samples // size)

    @property
    def epoch(self) -> int:
        """Epoch of the last returned batch, from 0."""
        return self._epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch. If that raises, the position does not change."""
        epoch, number = self._epoch, self._batch
        if number == len(self):
            epoch, number = epoch + 1, 0
        batch = self._take(self._indices(epoch, number))
        self._epoch, self._batch = epoch, number + 1
        return batch

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position: the epoch, the number of its returned batches, and the settings."""
        return {"epoch": self._epoch, "batch": self._batch, "seed": self._seed} | self._shape()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position and the seed.

        Raises:
            ConfigError: the number of samples or another setting differs, so batches would differ.
        """
        shape = self._shape()
        for name in _MUST_EQUAL:
            if state_dict[name] != shape[name]:
                raise ConfigError(
                    f"{name} was {state_dict[name]} when the position was saved and is "
                    f"{shape[name]} now, so the batches differ; use the same data and sizes, or "
                    "start again in an empty directory"
                )
        self._seed = int(state_dict["seed"])
        self._epoch, self._batch = int(state_dict["epoch"]), int(state_dict["batch"])
        self._order = None

    def _shape(self) -> dict[str, int | bool]:
        return {
            "samples": self._samples,
            "global_batch_size": self._batch_size * self.world,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def _indices(self, epoch: int, number: int) -> Tensor:
        order = self._order_of(epoch)
        size = self._batch_size * self.world
        indices = order[number * size : (number + 1) * size]
        if missing := -len(indices) % self.world:
            indices = torch.cat([indices, order.repeat(-(-missing // len(order)))[:missing]])
        return indices.chunk(self.world)[self._rank]

    def _order_of(self, epoch: int) -> Tensor:
        if self._order is None or self._order[:2] != (self._seed, epoch):
            order = torch.arange(self._samples)
            if self._shuffle:
                # A generator uses 32 bits of its seed. The hash makes equal orders for different
                # seeds or epochs unlikely.
                digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
                order = torch.randperm(self._samples, generator=generator)
            self._order = (self._seed, epoch, order)
        return self._order[2]


def _source(
    data: Any, collate: Callable[[list[Any]], Any] | None
) -> tuple[Callable[[Tensor], Any], int]:
    """Return a function that makes a batch from indices, and the number of samples."""
    if isinstance(data, Tensor):
        return data.__getitem__, len(data)
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        lengths = [len(part) for part in data]
        if len(set(lengths)) > 1:
            raise ConfigError(f"the tensors have {lengths} samples; they must have equally many")
        return lambda indices: tuple(part[indices] for part in data), lengths[0]
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"{type(data).__name__} has no length or no items; give tensors or a map-style dataset"
        )
    join = collate or torch.utils.data.default_collate
    take_many = getattr(data, "__getitems__", None)  # like a DataLoader

    def take(indices: Tensor) -> Any:
        numbers = indices.tolist()
        if take_many is not None:
            return join(take_many(numbers))
        return join([data[number] for number in numbers])

    return take, len(cast("Sequence[Any]", data))
