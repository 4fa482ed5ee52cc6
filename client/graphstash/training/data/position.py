"""DataPosition: a training run's position in its data and random numbers.

Data with `state_dict` and `load_state_dict`, such as `Batches` and torchdata's StatefulDataLoader,
stores its own position. For a DataLoader, or other data that gives one epoch per iteration, this
module stores the state of the random generators at the start of the epoch. Resuming starts that
epoch again, and loads and drops the batches that were used. For long epochs, use `Batches`.

The generators that the data has of its own continue with their saved states. Two kinds of draws
cannot be repeated, so `DataPosition` watches for them and warns:

* An iterable dataset, or a sampler of the user, and other code, such as a model with dropout, draw
  in turn from one global generator. Loading the batches again draws other numbers. Later batches
  differ if they depend on numbers that the dataset or the sampler drew for earlier ones. Those of a
  shuffle buffer do.
* A dataset draws in persistent workers. Only their first epoch begins with a known state.

This module never reads a device: CUDA and torch_xla generators have their state on the host. For
torch_xla, save the state right after `torch_xla.sync()`. After a draw, the state that torch_xla
returns lacks the seed from which the next `sync()` makes a new one.
"""

import logging
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from graphstash.errors import ConfigError
from graphstash.training.data.generators import generators_in, restore, states_of, with_tensors

__all__ = [
    "DataPosition",
    "generators_of",
    "host_random_state",
    "random_state",
    "set_random_state",
]

_log = logging.getLogger("graphstash")

_REMEDY: Final = (
    "give Batches, a DataLoader, or an object whose __iter__ starts again (or that has state_dict "
    "and load_state_dict)"
)


class DataPosition:
    """An endless iterator over epochs of data that records its position.

    Before each epoch, it passes the epoch's number, from 0, to `set_epoch` of the data, its dataset
    and its samplers.

    Args:
        data: gives the batches of an epoch each time it is iterated. An iterator works until it
            ends, but its position cannot be saved.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._stateful: Any = data if _has_state(data) else None
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self._returned = 0  # batches of this epoch
        self._start: dict[str, Any] | None = None  # random state at the start of this epoch
        own = self._stateful is None
        self._watches_sampler = own and _has_own_sampler(data)
        self._watches = self._watches_sampler or (own and _may_keep_draws(data))
        self._alternation = _Alternation(of_sampler=self._watches_sampler)
        self._drew_in_workers = torch.zeros(1, dtype=torch.bool)
        self._has_warned = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            ConfigError: an epoch has no batch.
        """
        while True:
            if self._batches is None:
                self._batches = self._begin(None)
            try:
                with self._alternation if self._watches else nullcontext():
                    batch = next(self._batches)
            except StopIteration:
                self._batches = None
                if self._returned == 0:
                    raise ConfigError(self._why_empty()) from None
                self._epoch, self._returned = self._epoch + 1, 0
            else:
                self._returned += 1
                return batch

    def close(self) -> None:
        """Close and drop the epoch's iterator, which ends its worker processes."""
        batches, self._batches = self._batches, None
        if batches is not self._data and (close := getattr(batches, "close", None)) is not None:
            close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the number of its returned batches, and the data's state.

        Call it in the thread that iterates, between two batches.

        Raises:
            ConfigError: the data can be iterated only once.
        """
        position: dict[str, Any] = {"epoch": self._epoch, "batch": self._returned}
        position["generators"] = states_of(generators_in(self._data))
        if self._stateful is not None:
            return position | {"data": self._stateful.state_dict()}
        if isinstance(self._data, Iterator):
            raise ConfigError(
                f"the data is a {type(self._data).__name__}, which can be iterated over only once: "
                f"its position cannot be saved in a checkpoint; {_REMEDY}, or train without "
                "checkpoints"
            )
        if (reason := self._why_inexact()) and not self._has_warned:
            self._has_warned = True
            _log.warning("a run that resumes here may get other batches: %s", reason)
        return position | {"start": self._start if self._returned else None, "inexact": reason}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a position. Call it before the first batch.

        This changes the state of the global random generators, so restore the checkpoint's random
        state after this call.

        Raises:
            ConfigError: the state belongs to other data.
        """
        if ("data" in state_dict) != (self._stateful is not None):
            raise ConfigError(
                f"the saved position does not fit {type(self._data).__name__}: give the data that "
                "the checkpoint was made with, or start again in an empty directory"
            )
        self._epoch, self._returned = int(state_dict["epoch"]), int(state_dict["batch"])
        if self._stateful is not None:
            self._stateful.load_state_dict(state_dict["data"])
            if self._returned:
                # Begin now: the checkpoint's random state is from after the draws at the beginning.
                self._batches = self._begin(None)
        elif self._returned:
            self._batches = self._begin(state_dict["start"])
            for number in range(self._returned):
                if next(self._batches, self) is self:
                    raise ConfigError(
                        f"epoch {self._epoch} had {self._returned} batches or more when its "
                        f"position was saved and has {number} now: give the same data, or start "
                        "again in an empty directory"
                    )
        if reason := state_dict.get("inexact"):
            _log.warning("this run resumes, perhaps with other batches: %s", reason)
        restore(generators_in(self._data), state_dict.get("generators", {}))
        self._alternation.begin()  # the caller restores the global generators

    def _begin(self, start: dict[str, Any] | None) -> Iterator[Any]:
        """Begin an epoch. Before that, restore `start` of the random generators, or record it."""
        generators = generators_of(self._data)
        if start is not None:
            if self._epoch and _has_persistent_workers(self._data):
                # Starting the workers draws a number. The saved epoch reused its workers and drew
                # none, so start them before the state is restored.
                self._iterate()
            set_random_state(start["host"])
            if len(generators) != len(start["own"]):
                raise ConfigError(
                    f"the data had {len(start['own'])} generators of random numbers when its "
                    f"position was saved and has {len(generators)} now: give the same data, or "
                    "start again in an empty directory"
                )
            for generator, state in zip(generators, start["own"], strict=True):
                generator.set_state(state)
            others, saved = generators_in(self._data), start.get("others", {})
            restore(others, {name: saved[name] for name in saved.keys() & others.keys()})
        elif self._stateful is None:
            start = {"host": host_random_state(), "own": [g.get_state() for g in generators]}
            start["others"] = states_of(generators_in(self._data))
        self._start = start
        for part in _parts(self._data):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self._epoch)
        self._alternation.begin()
        batches = self._iterate()
        sampler = getattr(batches, "_sampler_iter", None)
        if self._watches_sampler and sampler is not None:
            vars(batches)["_sampler_iter"] = self._alternation.watch_sampler(sampler)
        return batches

    def _iterate(self) -> Iterator[Any]:
        data: Any = self._data
        if not _has_persistent_workers(data) or getattr(data, "_iterator", self) is not None:
            return iter(data)
        self._drew_in_workers = torch.zeros(1, dtype=torch.bool).share_memory_()
        collate = data.collate_fn
        data.collate_fn = _WatchedCollation(collate, self._drew_in_workers)
        try:
            return iter(data)
        finally:
            data.collate_fn = collate

    def _why_inexact(self) -> str | None:
        if self._returned and self._alternation.found:
            return (
                "the data and other code, such as a model with dropout, draw in turn from the "
                f"global generator of {self._alternation.found}, and a later batch may depend on "
                "numbers that the data drew for an earlier one, as with a shuffle buffer; let the "
                "dataset and samplers draw from generators of their own"
            )
        if self._epoch and self._drew_in_workers.item():
            return (
                "persistent workers draw random numbers, and each epoch continues those of the "
                "epochs before; use persistent_workers=False"
            )
        return None

    def _why_empty(self) -> str:
        kind = type(self._data).__name__
        if isinstance(self._data, Iterator) and self._epoch:
            return f"the data, a {kind}, ended before the training: {_REMEDY}, or use fewer steps"
        return (
            f"epoch {self._epoch} of the data, a {kind}, has no batch: is it empty, or smaller "
            "than a batch with drop_last?"
        )


def _has_persistent_workers(data: object) -> bool:
    return bool(getattr(data, "persistent_workers", False))


def _may_keep_draws(data: object) -> bool:
    """Return whether an iteration over data may draw global numbers that it uses in later batches.

    A map-style dataset makes each sample from its index, and torch's samplers draw from generators
    of their own. Workers have global generators of their own.
    """
    if isinstance(data, DataLoader):
        return data.num_workers == 0 and isinstance(data.dataset, IterableDataset)
    return not isinstance(data, Sequence)


def _has_own_sampler(data: object) -> bool:
    """Return whether a map-style DataLoader has a sampler that is not torch's."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    samplers = (part for part in _parts(data) if part is not data and part is not data.dataset)
    return any(not type(each).__module__.startswith("torch.utils.data") for each in samplers)


class _Alternation(AbstractContextManager[None]):
    """Detects that data, in this context, and other code draw from a global generator in turn.

    For a DataLoader with a sampler of the user, only the draws of the sampler count as the data's.

    Attributes:
        found: the packages of such generators, or an empty string.
    """

    def __init__(self, *, of_sampler: bool) -> None:
        self._of_sampler = of_sampler
        self.begin()

    def begin(self) -> None:
        """Forget the draws before this call."""
        self.found = ""
        self._others: set[str] = set()
        self._before: dict[str, object] = {}
        self._last: dict[str, object] = {}

    def watch_sampler(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield the indices of a sampler, and detect its draws."""
        while True:
            before = {} if self.found else _global_states()
            index = next(indices, self)
            if not self.found:
                self.found = ", ".join(sorted(_changed(before, _global_states()) & self._others))
            if index is self:
                return
            yield index

    def __enter__(self) -> None:
        if not self.found:
            self._before = _global_states()
            self._others |= _changed(self._last, self._before)

    def __exit__(self, *_: object) -> None:
        if not self.found:
            self._last = _global_states()
        if not (self.found or self._of_sampler):
            self.found = ", ".join(sorted(_changed(self._before, self._last) & self._others))


class _WatchedCollation:
    """A `collate_fn` that stores in shared memory whether batches of its process change generators.

    The first call only reads their states.
    """

    def __init__(self, collate: Callable[[Any], Any], drew: Tensor) -> None:
        self._collate = collate
        self._drew = drew
        self._own: dict[str, Any] = {}
        self._last: dict[str, Any] | None = None

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if not self._drew.item():
            if self._last is None:  # once: a search of a large dataset takes 60 ms
                worker = get_worker_info()
                self._own = generators_in(worker and worker.dataset, self._collate)
            states = _global_states() | {"own": pickle.dumps(states_of(self._own))}
            if self._last is not None and _changed(self._last, states):
                self._drew.fill_(value=True)
            self._last = states
        return batch


def _global_states() -> dict[str, object]:
    states: dict[str, object] = {
        "Python": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        states["NumPy"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return states


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    return {name for name in before.keys() & now.keys() if before[name] != now[name]}


def _has_state(data: object) -> bool:
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def _parts(data: object) -> list[object]:
    """Return the distinct objects that determine the order: the data, its dataset and samplers."""
    batch_sampler = getattr(data, "batch_sampler", None)
    parts = [data, getattr(data, "dataset", None), getattr(data, "sampler", None)]
    parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if part is not None}.values())


def generators_of(data: object) -> list[torch.Generator]:
    """Return the distinct generators of the data, its dataset and its samplers."""
    found = (getattr(part, "generator", None) for part in _parts(data))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def random_state(device: torch.device | str) -> dict[str, Any]:
    """Return the state of all generators that training may use, as tensors and plain types.

    They are the host's, those of all visible CUDA devices if the process uses CUDA, and that of
    `device` if it is a torch_xla device. Call it at the end of a step.
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
    """Return the state of the host's generators of Python, torch and NumPy."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words), gauss),
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = with_tensors(numpy.random.get_state(legacy=False))
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
    """Restore a result of `random_state` or `host_random_state`.

    Sets the torch_xla state on `device`, which may have another number than when it was saved.
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
        for number, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            # Setting a state makes cuDNN's RNNs draw a new state of their dropout.
            if not torch.equal(torch.cuda.get_rng_state(number), cuda_state):
                torch.cuda.set_rng_state(cuda_state, number)
    if "torch_xla" in state and device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(state["torch_xla"], str(device))
