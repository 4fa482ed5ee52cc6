"""A flat tensor as rows, one per block, dealt out to streams.

Of n streams, stream i has the blocks i, i + n, i + 2n, and so on. Clustered nonzero blocks are
therefore spread over all streams.
"""

import numpy as np
import numpy.typing as npt

from graphstash.training.reduce.aggregators.datagrams import Numbers, Values

__all__ = ["BlockRows"]


class BlockRows:
    """Reads and writes the blocks of a contiguous, one-dimensional array of a wire type.

    Attributes:
        count: Number of blocks, including a shorter last one.
        elements: Number of elements of the array.
        block_size: Number of elements of a block.
        itemsize: Bytes of an element.
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
        """Return each stream's numbers of nonzero blocks, ascending."""
        table = np.zeros(-(-self.count // streams) * streams, np.bool_)
        table[: self.count] = nonzero
        stream, row = np.nonzero(table.reshape(-1, streams).T)
        numbers = (row * streams + stream).astype(np.uint32)
        return np.split(numbers, np.searchsorted(stream, np.arange(1, streams)))

    def read(self, numbers: Numbers, into: Values) -> None:
        """Copy the blocks with ascending `numbers` to the zeros [len(numbers), block_size]."""
        whole = self._whole_of(numbers)
        np.take(self._rows, numbers[:whole], axis=0, out=into[:whole], mode="clip")
        if whole < len(numbers):
            into[whole, : len(self._tail)] = self._tail

    def write(self, numbers: Numbers, values: Values) -> None:
        """Write values to the blocks; the inverse of `read`."""
        whole = self._whole_of(numbers)
        self._rows[numbers[:whole]] = values[:whole]
        if whole < len(numbers):
            self._tail[:] = values[whole, : len(self._tail)]

    def _whole_of(self, numbers: Numbers) -> int:
        ends_short = len(numbers) > 0 and int(numbers[-1]) == len(self._rows)
        return len(numbers) - ends_short
