"""The first message of a block-sparse sum, which every rank gathers from every rank.

    hash of the call | blocks of each grid | numbers of these blocks | blocks

Its size depends only on the number of ranks, so ranks that make different calls receive the
messages and report the difference. The numbers of a grid's blocks are in the message if they fit,
and so are its blocks. What is in a message follows from its counts.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed

from graphstash.training.lent import Lent

__all__ = ["MAX_NUMBER", "NUMBER_BYTES", "Form", "Opening", "aligned"]

NUMBER_BYTES: Final = 4
MAX_NUMBER: Final = 2**31
"""Blocks of a grid above which their numbers are not sent, because these have 31 bits."""

_ALL_BYTES: Final = 16 * 1024
"""Bytes that a rank receives. They take 0.13 ms on a link of 1 Gbit/s, less than a round takes."""

_MIN_BYTES: Final = 128
_COUNT_BYTES: Final = 8
_ALIGNMENT: Final = 16
"""Bytes of the largest element, complex128."""


class Form(NamedTuple):
    """What all ranks know about the blocks of a grid in advance.

    Attributes:
        blocks: Number of blocks.
        block_bytes: Bytes of a block on the wire.
    """

    blocks: int
    block_bytes: int


class _Places(NamedTuple):
    """What is in the message of one rank: byte offsets, and how many blocks, by grid.

    Attributes:
        numbers: Offset of a grid's numbers, or None if they do not fit.
        blocks: Offset of a grid's blocks.
        filled: Number of a grid's blocks in the message: all or none of them.
    """

    numbers: list[int | None]
    blocks: list[int]
    filled: list[int]


def _places_of(counts: Sequence[int], forms: Sequence[Form], capacity: int) -> _Places:
    places = _Places([], [], [])
    end = (1 + len(forms)) * _COUNT_BYTES
    for own, form in zip(counts, forms, strict=True):
        fits = form.blocks < MAX_NUMBER and end + own * NUMBER_BYTES <= capacity
        places.numbers.append(end if fits else None)
        end += own * NUMBER_BYTES * fits
    end = aligned(end)
    for own, form, numbers in zip(counts, forms, places.numbers, strict=True):
        fits = numbers is not None and end + own * form.block_bytes <= capacity
        places.blocks.append(end)
        places.filled.append(own * fits)
        end += own * form.block_bytes * fits
    return places


class Opening:
    """The first messages of all ranks.

    Attributes:
        is_same: Whether all ranks make the same call. If not, nothing else is valid.
        nbytes: Bytes of a ring all-reduce that would send as much as the messages.
    """

    def __init__(
        self,
        group: Any,
        call: str,
        own: Sequence[Tensor],
        forms: Sequence[Form],
        pack: Sequence[Callable[[Tensor], Tensor]],
        *,
        device: torch.device,
    ) -> None:
        """Send this rank's message, and receive those of all ranks; a collective call.

        Args:
            group: The process group.
            call: What must be equal on all ranks.
            own: Numbers of this rank's blocks, by grid.
            forms: The grids.
            pack: For each grid, returns blocks as they are sent, by their numbers. Empty to send
                none.
            device: Where the tensors are.

        Raises:
            RuntimeError: a rank is gone, or announces more blocks than there are.
        """
        self._forms = forms
        ranks = distributed.get_world_size(group)
        capacity = max(_MIN_BYTES, _ALL_BYTES // ranks // _ALIGNMENT * _ALIGNMENT)
        digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:_COUNT_BYTES], signed=True)
        counts = [len(numbers) for numbers in own]
        head = torch.tensor([digest, *counts])
        message = torch.zeros(capacity, dtype=torch.uint8, device=device)
        _put(message, 0, head.to(device))
        places = _places_of(counts, forms, capacity)
        for numbers, start in zip(own, places.numbers, strict=True):
            if start is not None:
                _put(message, start, numbers.to(torch.int32))
        for numbers, each, start, filled in zip(
            own, pack, places.blocks, places.filled, strict=False
        ):
            if filled:
                _put(message, start, each(numbers[:filled]))
        received = message.new_empty(ranks * capacity)
        with Lent(received, message):
            distributed.all_gather_into_tensor(received, message, group=group)
        self.nbytes = received.nbytes // 2
        self._messages = received.view(ranks, capacity)
        heads = self._messages[:, : head.nbytes].contiguous().view(torch.int64).tolist()
        self.is_same = all(each[0] == digest for each in heads)
        self._counts = [each[1:] for each in heads]
        self._places = []
        if self.is_same:
            _require_possible(self._counts, forms)
            self._places = [_places_of(each, forms, capacity) for each in self._counts]

    def counts(self, grid: int) -> list[int]:
        """Return the number of each rank's blocks."""
        return [counts[grid] for counts in self._counts]

    def numbers(self, grid: int) -> list[Tensor] | None:
        """Return the numbers of each rank's blocks, int64; None if they did not fit on some."""
        found = []
        for message, count, places in zip(
            self._messages, self.counts(grid), self._places, strict=True
        ):
            if (start := places.numbers[grid]) is None:
                return None
            end = start + count * NUMBER_BYTES
            found.append(message[start:end].view(torch.int32).long())
        return found

    def filled(self, grid: int) -> list[int]:
        """Return how many of each rank's blocks the messages have, beside all their numbers."""
        if any(places.numbers[grid] is None for places in self._places):
            return [0] * len(self._places)
        return [places.filled[grid] for places in self._places]

    def blocks(self, grid: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the elements of these blocks, by rank."""
        size = self._forms[grid].block_bytes
        found = []
        for message, places in zip(self._messages, self._places, strict=True):
            start = places.blocks[grid]
            found.append(message[start : start + places.filled[grid] * size].view(dtype))
        return found


def _require_possible(counts: Sequence[Sequence[int]], forms: Sequence[Form]) -> None:
    for rank, found in enumerate(counts):
        if any(not 0 <= own <= form.blocks for own, form in zip(found, forms, strict=True)):
            raise RuntimeError(f"rank {rank} announces {found} blocks of {forms}")


def aligned(nbytes: int) -> int:
    """Return the next multiple of the size of the largest element."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _put(message: Tensor, start: int, values: Tensor) -> None:
    here = values.view(torch.uint8)
    message[start : start + len(here)] = here
