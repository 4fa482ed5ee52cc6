"""Cells: a gradient's size, density and overlap, and the bytes of gloo and the links."""

import math
from dataclasses import dataclass

import torch

BLOCK = 256  # elements
OVERLAPS = ("none", "random", "full")

SLOT = 4 * 1024**2
SEGMENT = 1024**2
CALL = 24
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


def look_bytes(cell):
    """Return the bytes that a block-sparse all-reduce sends to agree on the call and the blocks."""
    workers, bitmap, numbers = cell.workers, -(-cell.blocks // 8), cell.own * NUMBER
    by_number = workers * numbers < 2 * bitmap
    union = gather_bytes(numbers, workers) if by_number else ring_bytes(bitmap, workers, 1)
    return [ring_bytes(CALL, workers, 8), union]


def gathers(cell):
    """Return whether the workers' blocks are gathered, or the union's added up on the ring."""
    return cell.workers * cell.own * (4 * BLOCK + NUMBER) < 2 * cell.union() * 4 * BLOCK


def block_bytes(cell):
    """Return the bytes of `BlockSparseAllReduce`: to agree on blocks, then the blocks in slots."""
    blocks = cell.own if gathers(cell) else cell.union()
    most = SLOT // (4 * BLOCK)
    slots = [min(most, blocks - start) for start in range(0, blocks, most)]
    if gathers(cell):
        sent = [
            gather_bytes(-(-each * NUMBER // 16) * 16 + each * 4 * BLOCK, cell.workers)
            for each in slots
        ]
    else:
        sent = [ring_bytes(each * 4 * BLOCK, cell.workers) for each in slots]
    return tuple(map(sum, zip(*look_bytes(cell), *sent, strict=True)))


def link_payload(gbits):
    """Return TCP's payload bytes per second; a frame of 1514 bytes holds 1448."""
    return gbits * 1e9 / 8 * 1448 / 1514
