"""Random generators that data, a model or a function has of its own, and their states."""

import itertools
import logging
import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from graphstash.training.places import search

__all__ = ["generators_in", "restore", "states_of", "with_tensors"]

_log = logging.getLogger("graphstash")

_MAX_OBJECTS: Final = 10_000
"""Maximum number of objects to search."""

_MAX_ENTRIES: Final = 1_000
"""Maximum number of entries of a container to search. A larger container probably holds samples,
which have no generators."""


def generators_in(*holders: object) -> dict[str, Any]:
    """Return the generators of torch, NumPy and Python that objects reach, except global ones.

    The name of a generator consists of its place, its kind and a number.
    """
    kinds: list[type] = [torch.Generator, random.Random]
    common: list[object] = [torch.default_generator, random._inst]
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
        common.append(numpy.random.mtrand._rand)
    found: dict[str, Any] = {}
    known = {*map(id, common)}
    for place, each in search(holders, *kinds, most=_MAX_OBJECTS, widest=_MAX_ENTRIES):
        if id(each) in known or not _is_restorable(each):
            continue
        known.add(id(each))
        kind = type(getattr(each, "bit_generator", each)).__name__
        names = (f"{place.name} ({kind} {number})" for number in itertools.count(1))
        found[next(name for name in names if name not in found)] = each
    return found


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators, as tensors and plain types."""
    return {name: _state_of(each) for name, each in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore a result of `states_of`. Warn of generators that are missing now."""
    for name, state in states.items():
        if (generator := generators.get(name)) is not None:
            _set_state(generator, state)
            continue
        _log.warning(
            "the checkpoint has the state of the generator %r of random numbers, but this run has "
            "no generator there: it draws other numbers than the run that made the checkpoint. "
            "Make the generator before the training, such as in __init__",
            name,
        )


def with_tensors(state: Any) -> Any:
    """Return a state of NumPy with tensors in place of arrays."""
    if (numpy := sys.modules.get("numpy")) is None:
        return state
    return pytree.tree_map_only(numpy.ndarray, lambda a: torch.from_numpy(a.copy()), state)


def _is_restorable(generator: Any) -> bool:
    """Return whether `_set_state` can restore a generator. It does not know the states of Python's
    subclasses, such as `SystemRandom`.
    """
    return (
        not isinstance(generator, random.Random)
        or type(generator).getstate is random.Random.getstate
    )


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return version, torch.tensor(words), gauss
    if hasattr(generator, "bit_generator"):
        return with_tensors(generator.bit_generator.state)
    return with_tensors(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    else:
        state = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.numpy(), state)
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
