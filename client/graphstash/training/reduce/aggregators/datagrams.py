"""What workers and aggregators say to each other: one message in one datagram, sealed.

    header, 56 bytes   fixed fields, little-endian: `Header`
    values             `filled` blocks, or the text of FAILED and LEAVE, or the ranks of WAITING
    numbers            `filled` numbers of blocks, uint32, ascending
    seal, 16 bytes     HMAC-SHA256 of all that is before it, the first 16 bytes

    OPEN     worker      begins a session; as long as the datagrams to come will be
    WELCOME  aggregator  answers OPEN, as long as it
    DATA     worker      blocks of a round, and the number of the next one that is not zero
    RESULT   aggregator  the sums of a round, and the number from which the next round goes on
    WAITING  aggregator  answers what came twice: it is there, and these ranks are missing
    ASK      worker      DATA again, without blocks, after WAITING
    ALIVE    worker      nothing else to say; `round` counts them
    LEAVE    worker      ends its part of the session, and says why if it failed
    LEFT     aggregator  answers LEAVE
    FAILED   aggregator  the session is over, and why

A datagram of another job, session or aggregator, one that is cut off, and one that somebody else
has made, differ in the seal or in a field that the seal covers, and are thrown away. One that comes
twice has the number of an old round.
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
"""The number of no block: there is no next one."""

LONGEST: Final = 65_507
"""Bytes that UDP over IPv4 carries at most."""

_MAGIC: Final = b"GSA1"
_FIELDS: Final = struct.Struct("<4sBBBxQHHHHIHHQQII")
_SEAL_BYTES: Final = 16

OVERHEAD_BYTES: Final = _FIELDS.size + _SEAL_BYTES
"""Of a datagram beside its blocks and their numbers: header and seal."""

_NUMBER_BYTES: Final = 4


class Kind(IntEnum):
    """What a message says; see the module."""

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
    """What an aggregator makes of the ranks' elements."""

    SUM = 1
    MAX = 2


class Header(NamedTuple):
    """The fields of every message; those that a kind does not need are 0.

    Attributes:
        kind: what it says. OPEN has how many workers there are in `filled`, and in `round` how many
            milliseconds one may be silent; WELCOME has in `elements` how many bytes may wait for
            the aggregator.
        element: code of the blocks' type in `ELEMENTS`.
        operation: SUM or MAX.
        session: a random number.
        rank: of the worker that sends or is answered.
        aggregator: number of the aggregator that sends or is meant.
        slot: of the aggregator's pool.
        streams: into which the tensor's blocks are dealt out.
        tensor: how many tensors came before it in the session, modulo 2**32.
        capacity: blocks that fit into a datagram.
        filled: with how many blocks this one is.
        round: how many rounds the slot had before this one.
        elements: of the tensor.
        block_size: elements of a block.
        next: in DATA the worker's next block, in RESULT the smallest of all ranks' next; or END.
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
        """What is the same in all datagrams of a tensor, on all ranks."""
        return (
            *(self.tensor, self.elements, self.element, self.block_size),
            *(self.operation, self.capacity, self.streams),
        )


class Message(NamedTuple):
    """A datagram that somebody with the key has sealed.

    Attributes:
        header: its fields.
        body: what is between header and seal.
    """

    header: Header
    body: memoryview

    @property
    def text(self) -> str:
        """Of FAILED and LEAVE."""
        return bytes(self.body).decode("utf-8", "replace")

    @property
    def ranks(self) -> list[int]:
        """Of WAITING."""
        return [int(rank) for rank in np.frombuffer(self.body, "<u2")]

    @property
    def has_blocks(self) -> bool:
        """Whether the body is as long as the header says, of DATA and RESULT."""
        return len(self.body) == self._value_bytes + self.header.filled * _NUMBER_BYTES

    def blocks(self) -> tuple[Numbers, Values]:
        """Numbers and elements [filled, block_size] of a message that has blocks."""
        header = self.header
        values = np.frombuffer(self.body[: self._value_bytes], ELEMENTS[header.element].wire)
        numbers = np.frombuffer(self.body[self._value_bytes :], "<u4")
        return numbers, values.reshape(header.filled, header.block_size)

    @property
    def _value_bytes(self) -> int:
        header = self.header
        return header.filled * header.block_size * ELEMENTS[header.element].wire.itemsize


class Seal:
    """Makes and opens the datagrams of one session.

    Args:
        key: of 32 bytes or more that only the session's processes know.
        session: its number, 0 to 2**64 - 1.
    """

    def __init__(self, key: bytes, session: int) -> None:
        self._key = hmac.digest(key, b"graphstash aggregation" + session.to_bytes(8), "sha256")
        self.session = session

    def close(self, header: Header, body: bytes | bytearray | memoryview = b"") -> bytearray:
        """The datagram of a message."""
        datagram = self._blank(header, len(body))
        datagram[_FIELDS.size : -_SEAL_BYTES] = body
        return self._sealed(datagram)

    def close_blocks(
        self, header: Header, numbers: Numbers, fill: Callable[[Values], object]
    ) -> bytearray:
        """The datagram of a message with blocks.

        Args:
            header: of which `filled` is the length of `numbers`.
            numbers: of the blocks, ascending.
            fill: is called with zeros [filled, block_size] of the wire's type to write to.
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
        """What a datagram says; None when it is not of its session, or its seal is not right."""
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
    """The session that a datagram says it is of; None when it is no datagram of this protocol."""
    if len(datagram) < OVERHEAD_BYTES or datagram[:4] != _MAGIC:
        return None
    return int.from_bytes(datagram[8:16], "little")


def blocks_per_datagram(payload_bytes: int, block_bytes: int) -> int:
    """How many blocks of that many bytes go into a datagram, with their numbers; 0 for none."""
    return max(0, payload_bytes - OVERHEAD_BYTES) // (block_bytes + _NUMBER_BYTES)
