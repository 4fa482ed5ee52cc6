"""A flat tensor as rows, one for each block, dealt out to streams.

Of `streams` streams, number i has the blocks i, i + streams, i + 2 * streams, ...: where the blocks
that are not zero lie close together, all streams have their share of them.
"""

import numpy as np
import numpy.typing as npt

from graphstash.training.reduce.aggregators.datagrams import Numbers, Values

__all__ = ["BlockRows"]


class BlockRows:
    """Reads and writes blocks in place. The last one is filled up with zeros while it is sent.

    Args:
        flat: one dimension, contiguous, of a type of the wire; is written to.
        block_size: elements of a block.

    Attributes:
        count: of blocks, the last and shorter one included.
        elements: of the tensor.
        block_size: elements of a block.
        itemsize: bytes of an element.
    """

    def __init__(self, flat: Values, block_size: int) -> None:
        whole = len(flat) // block_size
        self.elements = len(flat)
        self.block_size = block_size
        self.itemsize = flat.itemsize
        self.count = -(-len(flat) // block_size)
        self._rows = flat[: whole * block_size].reshape(whole, block_size)
        self._tail = flat[whole * block_size :]

    def deal(self, nonzero: npt.NDArray[np.bool_], streams: int) -> list[Numbers]:
        """The numbers of the blocks that are not zero, by stream, each ascending.

        Args:
            nonzero: a boolean for each block.
            streams: how many, 1 or more.
        """
        table = np.zeros(-(-self.count // streams) * streams, np.bool_)
        table[: self.count] = nonzero
        stream, row = np.nonzero(table.reshape(-1, streams).T)
        numbers = (row * streams + stream).astype(np.uint32)
        return np.split(numbers, np.searchsorted(stream, np.arange(1, streams)))

    def read(self, numbers: Numbers, into: Values) -> None:
        """Copies blocks, ascending, to zeros [len(numbers), block_size]."""
        whole = self._whole_of(numbers)
        np.take(self._rows, numbers[:whole], axis=0, out=into[:whole], mode="clip")
        if whole < len(numbers):
            into[whole, : len(self._tail)] = self._tail

    def write(self, numbers: Numbers, values: Values) -> None:
        """The opposite of `read`."""
        whole = self._whole_of(numbers)
        self._rows[numbers[:whole]] = values[:whole]
        if whole < len(numbers):
            self._tail[:] = values[whole, : len(self._tail)]

    def _whole_of(self, numbers: Numbers) -> int:
        """How many of the blocks are not the shorter one."""
        ends_short = len(numbers) > 0 and int(numbers[-1]) == len(self._rows)
        return len(numbers) - ends_short
