"""The messages between workers and aggregators: one message per datagram, authenticated.

    header, 56 bytes   fixed fields, little-endian: `Header`
    body               DATA and RESULT: `filled` blocks, and then their ascending numbers, uint32
                       FAILED and LEAVE: text. WAITING: ranks, uint16. OPEN and WELCOME: zeros
    seal, 16 bytes     the first 16 bytes of HMAC-SHA256 over header and body

    OPEN     worker      begins a session; padded to a datagram size that the worker tries
    WELCOME  aggregator  answers OPEN, with the same size
    DATA     worker      blocks of a round, and the number of the worker's next nonzero block
    RESULT   aggregator  the sums of a round, and the number at which the next round begins
    WAITING  aggregator  answers a repeated DATA or an ASK: lists the ranks whose DATA is missing
    ASK      worker      replaces further repetitions of DATA after WAITING; has no blocks
    ALIVE    worker      heartbeat; `round` is its number
    LEAVE    worker      ends the worker's part in the session; has a text if the worker failed
    LEFT     aggregator  answers LEAVE
    FAILED   aggregator  the session is over; the text says why

Receivers drop a datagram whose seal, session or aggregator number does not match, and recognize a
duplicate by its round.
"""

import hmac
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from graphstash.training.reduce.aggregators.elements import ELEMENTS

__all__ = [
    "END",
    "LONGEST",
    "OVERHEAD_BYTES",
    "Header",
    "Kind",
    "Message",
    "Numbers",
    "Operation",
    "Seal",
    "Values",
    "blocks_per_datagram",
    "session_of",
]

Numbers: TypeAlias = npt.NDArray[np.uint32]
Values: TypeAlias = npt.NDArray[Any]

END: Final = 2**32 - 1
"""Block number that means "no next block"."""

LONGEST: Final = 65_507
"""Maximum payload of a UDP datagram over IPv4, bytes."""

_MAGIC: Final = b"GSA1"
_FIELDS: Final = struct.Struct("<4sBBBxQHHHHIHHQQII")
_SEAL_BYTES: Final = 16

OVERHEAD_BYTES: Final = _FIELDS.size + _SEAL_BYTES
"""Bytes of header and seal in each datagram."""

_NUMBER_BYTES: Final = 4


class Kind(IntEnum):
    """Kind of a message; see the module's docstring."""

    OPEN = 1
    WELCOME = 2
    DATA = 3
    RESULT = 4
    WAITING = 5
    ASK = 6
    ALIVE = 7
    LEAVE = 8
    LEFT = 9
    FAILED = 10


class Operation(IntEnum):
    """How an aggregator combines the elements of the ranks."""

    SUM = 1
    MAX = 2


class Header(NamedTuple):
    """The fields of every message. Receivers ignore the fields that a kind does not use.

    Attributes:
        kind: Kind of the message. OPEN stores the number of workers in `filled`, and
            `lost_after_seconds` in `round`, in milliseconds. WELCOME stores the aggregator's
            receive buffer in `elements`, in bytes.
        element: Code of the blocks' type in `ELEMENTS`.
        operation: SUM or MAX.
        session: Random number of the session.
        rank: Rank of the worker that sends the message, or to which the aggregator sends WELCOME,
            WAITING or LEFT.
        aggregator: Number of the aggregator that sends or is addressed.
        slot: Number of the slot in the aggregator's pool.
        streams: Number of streams that share the tensor's blocks.
        tensor: Number of earlier tensors in the session, modulo 2**32.
        capacity: Maximum number of blocks in a datagram.
        filled: Number of blocks in this datagram.
        round: Number of earlier rounds of the slot.
        elements: Number of elements of the tensor.
        block_size: Number of elements of a block.
        next: Number of a block, or END. In DATA the worker's next block after this datagram, in
            RESULT the block at which the next round begins.
    """

    kind: int
    element: int = 0
    operation: int = 0
    session: int = 0
    rank: int = 0
    aggregator: int = 0
    slot: int = 0
    streams: int = 0
    tensor: int = 0
    capacity: int = 0
    filled: int = 0
    round: int = 0
    elements: int = 0
    block_size: int = 0
    next: int = END

    @property
    def tensor_fields(self) -> tuple[int, ...]:
        """Fields that are equal in every DATA and RESULT of a tensor, on all ranks."""
        return (
            *(self.tensor, self.elements, self.element, self.block_size),
            *(self.operation, self.capacity, self.streams),
        )


class Message(NamedTuple):
    """Header and body of a datagram with a valid seal."""

    header: Header
    body: memoryview

    @property
    def text(self) -> str:
        """Text of FAILED or LEAVE."""
        return bytes(self.body).decode("utf-8", "replace")

    @property
    def ranks(self) -> list[int]:
        """Missing ranks in WAITING."""
        return [int(rank) for rank in np.frombuffer(self.body, "<u2")]

    @property
    def has_blocks(self) -> bool:
        """Whether the length of the body of DATA or RESULT matches the header."""
        return len(self.body) == self._value_bytes + self.header.filled * _NUMBER_BYTES

    def blocks(self) -> tuple[Numbers, Values]:
        """Return numbers [filled] and elements [filled, block_size] of the blocks in the body."""
        header = self.header
        values = np.frombuffer(self.body[: self._value_bytes], ELEMENTS[header.element].wire)
        numbers = np.frombuffer(self.body[self._value_bytes :], "<u4")
        return numbers, values.reshape(header.filled, header.block_size)

    @property
    def _value_bytes(self) -> int:
        header = self.header
        return header.filled * header.block_size * ELEMENTS[header.element].wire.itemsize


class Seal:
    """Authenticates the datagrams of one session: `close` appends the seal, and `open` checks it.

    `key` is a secret that the session's processes share, 32 bytes or more. `session` is below
    2**64.
    """

    def __init__(self, key: bytes, session: int) -> None:
        self._key = hmac.digest(key, b"graphstash aggregation" + session.to_bytes(8), "sha256")
        self.session = session

    def close(self, header: Header, body: bytes | bytearray | memoryview = b"") -> bytearray:
        """Return the sealed datagram of a message."""
        datagram = self._blank(header, len(body))
        datagram[_FIELDS.size : -_SEAL_BYTES] = body
        return self._sealed(datagram)

    def close_blocks(
        self, header: Header, numbers: Numbers, fill: Callable[[Values], object]
    ) -> bytearray:
        """Return the sealed datagram of a message with blocks. Their numbers must ascend.

        `fill` writes the blocks to the array that it receives: zeros [filled, block_size] of the
        wire type.
        """
        element = ELEMENTS[header.element]
        value_bytes = header.filled * header.block_size * element.wire.itemsize
        datagram = self._blank(header, value_bytes + header.filled * _NUMBER_BYTES)
        body = memoryview(datagram)[_FIELDS.size : -_SEAL_BYTES]
        if header.filled:
            values = np.frombuffer(body[:value_bytes], element.wire)
            fill(values.reshape(header.filled, header.block_size))
            np.frombuffer(body[value_bytes:], "<u4")[:] = numbers
        del body
        return self._sealed(datagram)

    def open(self, datagram: bytes | bytearray) -> Message | None:
        """Return the message, or None if the session differs or the seal is invalid."""
        if session_of(datagram) != self.session:
            return None
        view = memoryview(datagram)
        expected = hmac.digest(self._key, view[:-_SEAL_BYTES], "sha256")[:_SEAL_BYTES]
        if not hmac.compare_digest(expected, view[-_SEAL_BYTES:]):
            return None
        header = Header._make(_FIELDS.unpack_from(datagram)[1:])
        return Message(header, view[_FIELDS.size : -_SEAL_BYTES])

    def _blank(self, header: Header, body_bytes: int) -> bytearray:
        datagram = bytearray(_FIELDS.size + body_bytes + _SEAL_BYTES)
        _FIELDS.pack_into(datagram, 0, _MAGIC, *header._replace(session=self.session))
        return datagram

    def _sealed(self, datagram: bytearray) -> bytearray:
        seal = hmac.digest(self._key, memoryview(datagram)[:-_SEAL_BYTES], "sha256")
        datagram[-_SEAL_BYTES:] = seal[:_SEAL_BYTES]
        return datagram


def session_of(datagram: bytes | bytearray) -> int | None:
    """Return the session number in a datagram, without checking the seal. Return None if the
    datagram is too short or of another protocol.
    """
    if len(datagram) < OVERHEAD_BYTES or datagram[:4] != _MAGIC:
        return None
    return int.from_bytes(datagram[8:16], "little")


def blocks_per_datagram(payload_bytes: int, block_bytes: int) -> int:
    """Return how many blocks with their numbers fit into a datagram; 0 if a block is too large."""
    return max(0, payload_bytes - OVERHEAD_BYTES) // (block_bytes + _NUMBER_BYTES)
