"""Cells: a gradient's size, density and overlap, and the bytes of gloo and the links."""

import math
from dataclasses import dataclass

import torch

BLOCK = 256  # elements
OVERLAPS = ("none", "random", "full")

SLOT = 4 * 1024**2
SEGMENT = 1024**2
OPENING = 16 * 1024
MESSAGE = 4 * 1024
NUMBER = 4
GLOO_HEADER = 48
"""Bytes of gloo's messages for each send: the sender's notice, the receiver's, and the data's."""


@dataclass(frozen=True)
class Cell:
    workers: int
    mib: int
    density: float
    overlap: str

    def __str__(self):
        return f"{self.density:g}" + ("" if self.density == 1 else f", {self.overlap}")

    @property
    def is_possible(self):
        """Return whether the cell exists.

        Without overlap, workers need blocks of their own. At density 1, everything overlaps.
        """
        if self.density == 1:
            return self.overlap == "full"
        return self.overlap != "none" or self.workers * self.own <= self.blocks

    @property
    def size(self):
        """Bytes of the gradient."""
        return self.mib * 1024**2

    @property
    def blocks(self):
        return self.size // (4 * BLOCK)

    @property
    def own(self):
        """Number of nonzero blocks on each worker."""
        return max(1, round(self.density * self.blocks))

    def chosen(self, rank):
        """Return a boolean for each block: whether it is nonzero on this worker."""
        drawn = torch.Generator().manual_seed(rank + 1 if self.overlap == "random" else 0)
        order = torch.randperm(self.blocks, generator=drawn)
        first = rank * self.own if self.overlap == "none" else 0
        flags = torch.zeros(self.blocks, dtype=torch.bool)
        flags[order[first : first + self.own]] = True
        return flags

    def values(self, rank):
        """Return the value of each block's elements on this worker: integers, for exact sums."""
        return self.chosen(rank) * (rank + 1.0) * (torch.arange(self.blocks) % 7 + 1)

    def sums(self):
        return sum(self.values(rank) for rank in range(self.workers))

    def union(self):
        """Return the number of blocks that are nonzero on at least one worker."""
        return int(self.sums().count_nonzero())


def ring_bytes(size, workers, itemsize=4):
    """Return the elements' and headers' bytes of an all-reduce of `size` bytes on gloo's ring.

    gloo cuts the tensor into segments of at most 1 MiB, an equal number for each worker and at
    least two.
    """
    segments = max(-(-size // SEGMENT), 2 * workers)
    segments = -(-segments // workers) * workers
    length = -(-size // segments)
    length = -(-length // itemsize) * itemsize
    messages = math.ceil(size / length) * 2 * (workers - 1)
    return 2 * (workers - 1) * size, 3 * GLOO_HEADER * messages


def gather_bytes(size, workers):
    """Return the bytes of all workers for an all-gather of `size` bytes each, on gloo's ring."""
    pairs = workers * (workers - 1)
    return pairs * size, 6 * GLOO_HEADER * pairs  # in two halves


def agreement(cell):
    """Return what a block-sparse all-reduce sends to agree on the call and the blocks.

    That is the messages' bytes, whether all workers then have all numbers, and how many of its
    blocks each worker has sent.
    """
    workers, numbers, bitmap = cell.workers, cell.own * NUMBER, -(-cell.blocks // 8)
    capacity = OPENING // workers // 16 * 16
    opening = gather_bytes(capacity, workers)
    if 16 + numbers <= capacity:
        fits = aligned(16 + numbers) + cell.own * 4 * BLOCK <= capacity
        return [opening], True, cell.own * fits
    if workers * numbers < 2 * bitmap + workers * MESSAGE:
        return [opening, gather_bytes(numbers, workers)], True, 0
    return [opening, ring_bytes(bitmap, workers, 1)], False, 0


def look_bytes(cell):
    """Return the bytes that a block-sparse all-reduce sends to agree on the call and the blocks."""
    sent, _, _ = agreement(cell)
    return sent


def block_bytes(cell):
    """Return the bytes of `BlockSparseAllReduce`: to agree on blocks, then the blocks in slots."""
    sent, has_numbers, filled = agreement(cell)
    rest, numbers, block = cell.own - filled, 0 if has_numbers else NUMBER, 4 * BLOCK
    gathered = cell.workers * rest * (block + numbers)
    gathers = gathered < 2 * cell.union() * block + cell.workers * MESSAGE
    blocks, most = rest if gathers else cell.union(), SLOT // block
    for each in (min(most, blocks - start) for start in range(0, blocks, most)):
        if gathers:
            sent.append(gather_bytes(aligned(each * numbers) + each * block, cell.workers))
        else:
            sent.append(ring_bytes(each * block, cell.workers))
    return tuple(map(sum, zip(*sent, strict=True)))


def aligned(size):
    return -(-size // 16) * 16


def link_payload(gbits):
    """Return TCP's payload bytes per second; a frame of 1514 bytes holds 1448."""
    return gbits * 1e9 / 8 * 1448 / 1514
