"""DeviceLog: the numbers of the last steps, kept on the device until somebody asks.

Each step writes a row into a table there, and begins again at its top when it is full. At a logging
boundary the table is read once, and the host learns about every step since the last boundary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from graphstash.training.device import assign, upload
from graphstash.training.operation import Operation

__all__ = ["DeviceLog"]


class DeviceLog:
    """A table [rows, columns] of float32 on the device.

    Args:
        columns: names of the numbers that each step has.
        rows: how many steps fit between two reads, >= 1; a further one overwrites the first.
        device: where it is.
    """

    def __init__(self, columns: Sequence[str], rows: int, device: torch.device) -> None:
        self.columns = tuple(columns)
        self._read_count = 0
        empty = torch.full((rows, len(self.columns)), math.nan)
        first = torch.tensor(0, dtype=torch.int32)
        numbers = torch.arange(rows, dtype=torch.int32).unsqueeze(1)  # [rows, 1]
        self._table, self._next, self._numbers = upload([empty, first, numbers], device)

    @torch.no_grad()
    def append(self, values: Mapping[str, Tensor]) -> None:
        """Writes a row; part of the step, reads nothing.

        Args:
            values: by column, each with one element.
        """
        row = [values[column].detach() for column in self.columns]
        changed = _append([self._table, self._next, self._numbers, *row], self._table.shape)
        assign([self._table, self._next], changed)

    def read(self, count: int) -> list[dict[str, float]]:
        """Reads the device: the rows of the last `count` steps.

        Args:
            count: how many steps were appended since the last read, at most `rows`.
        """
        rows = self._table.cpu().tolist()
        numbers = range(self._read_count, self._read_count + count)
        self._read_count += count
        return [dict(zip(self.columns, rows[n % len(rows)], strict=True)) for n in numbers]

    def device_tensors(self) -> Iterator[Tensor]:
        """What a step reads and changes."""
        yield from (self._table, self._next, self._numbers)

    def refresh(self) -> None:
        """Nothing here is decided by the host."""


def _with_row(inputs: list[Tensor], key: object) -> list[Tensor]:
    del key
    table, position, numbers, *values = inputs
    row = torch.stack([value.reshape(()).float() for value in values])
    return [torch.where(numbers == position, row, table), (position + 1) % table.shape[0]]


_append = Operation("log", _with_row)
