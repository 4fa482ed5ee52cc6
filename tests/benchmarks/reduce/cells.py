"""Cells: a gradient's size, density and overlap, and what gloo and the links make of bytes."""

import math
from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "OVERLAPS", "Cell", "link_payload", "ring_bytes"]

BLOCK = 256  # elements
OVERLAPS = ("none", "random", "full")

SLOT = 4 * 1024**2
SEGMENT = 1024**2
MARK = 16
GLOO_HEADER = 48
"""Of gloo's messages: for each send the sender's notice, the receiver's, and the data."""


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
        """Without overlap the workers need blocks of their own; at density 1 all is overlap."""
        if self.density == 1:
            return self.overlap == "full"
        return self.overlap != "none" or self.workers * self.own <= self.blocks

    @property
    def size(self):
        """Bytes."""
        return self.mib * 1024**2

    @property
    def blocks(self):
        return self.size // (4 * BLOCK)

    @property
    def own(self):
        """Blocks that are not zero on each worker."""
        return max(1, round(self.density * self.blocks))

    def chosen(self, rank):
        """A boolean for each block: whether it is not zero on this worker."""
        drawn = torch.Generator().manual_seed(rank + 1 if self.overlap == "random" else 0)
        order = torch.randperm(self.blocks, generator=drawn)
        first = rank * self.own if self.overlap == "none" else 0
        flags = torch.zeros(self.blocks, dtype=torch.bool)
        flags[order[first : first + self.own]] = True
        return flags

    def values(self, rank):
        """What all elements of each block are on this worker: whole, so that sums are exact."""
        return self.chosen(rank) * (rank + 1.0) * (torch.arange(self.blocks) % 7 + 1)

    def sums(self):
        """The same, of all workers."""
        return sum(self.values(rank) for rank in range(self.workers))

    def union(self):
        """Blocks that are not zero on at least one worker."""
        return int(self.sums().count_nonzero())


def ring_bytes(size, workers, itemsize=4):
    """What all workers send for an all-reduce of `size` bytes on gloo's ring: elements, headers.

    gloo cuts the tensor into segments of at most 1 MiB, as many for each worker and two at least.
    """
    segments = max(-(-size // SEGMENT), 2 * workers)
    segments = -(-segments // workers) * workers
    length = -(-size // segments)
    length = -(-length // itemsize) * itemsize
    messages = math.ceil(size / length) * 2 * (workers - 1)
    return 2 * (workers - 1) * size, 3 * GLOO_HEADER * messages


def look_bytes(cell):
    """What the block-sparse all-reduce sends through it to agree: a mark, and a bitmap."""
    return [ring_bytes(size, cell.workers, 1) for size in (MARK, -(-cell.blocks // 8))]


def block_bytes(cell, union):
    """The same, and then slots of blocks."""
    whole, rest = divmod(union * 4 * BLOCK, SLOT)
    slots = [ring_bytes(slot, cell.workers) for slot in [SLOT] * whole + [rest] * (rest > 0)]
    return tuple(map(sum, zip(*look_bytes(cell), *slots, strict=True)))


def link_payload(gbits):
    """Bytes of TCP's payload in a second; 1448 fit into a frame of 1514."""
    return gbits * 1e9 / 8 * 1448 / 1514
