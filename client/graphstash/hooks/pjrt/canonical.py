"""Canonical form of compile options: sort the entries of protobuf maps, and change nothing else.

Compile options are a protobuf message. Protobuf serializes the entries of a map in a different
order in each process, so a key of the raw bytes would not hit. A serialized map is a run of fields
with one number, each a message of exactly two fields, 1 (the key) and 2 (the value), both of which
writers always write (https://protobuf.dev/programming-guides/encoding/#maps). Only such runs are
sorted, and only if their keys have one type and none repeats. Other sequences, whose order matters,
do not match: the devices of a device assignment, for example, are messages of one field.

No schema is needed, so messages of a newer XLA work. Bytes that do not parse stay unchanged.
"""

from typing import Final, NamedTuple

__all__ = ["canonical"]

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

_MAX_VARINT_BYTES: Final = 10
_MAX_DEPTH: Final = 32
"""Nesting of messages down to which maps are sorted. Protobuf's own limit is 100."""


class _Field(NamedTuple):
    number: int
    wire_type: int
    head: bytes
    """Bytes of the tag and, if the field has a length, of the length."""
    body: bytes


class _NotAMessageError(Exception):
    """The bytes are no protobuf message, but text, packed numbers or damaged."""


def canonical(message: bytes) -> bytes:
    """Return the message with the entries of every map sorted. The length stays the same."""
    return _canonical(message, depth=0)


def _canonical(message: bytes, *, depth: int) -> bytes:
    try:
        fields = _parsed(message)
    except _NotAMessageError:
        return message
    if depth < _MAX_DEPTH:
        fields = [
            field._replace(body=_canonical(field.body, depth=depth + 1))
            if field.wire_type == _BYTES
            else field
            for field in fields
        ]
    written: list[bytes] = []
    start = 0
    while start < len(fields):
        end = start + 1
        while end < len(fields) and fields[end].number == fields[start].number:
            end += 1
        run = fields[start:end]
        if len(run) > 1 and _is_map(run):
            run.sort(key=lambda field: field.body)
        written += [field.head + field.body for field in run]
        start = end
    return b"".join(written)


def _is_map(run: list[_Field]) -> bool:
    keys = set()
    for field in run:
        if field.wire_type != _BYTES:
            return False
        try:
            entry = _parsed(field.body)
        except _NotAMessageError:
            return False
        if [part.number for part in entry] != [1, 2]:
            return False
        keys.add((entry[0].wire_type, entry[0].body))
    return len(keys) == len(run) and len({wire_type for wire_type, _ in keys}) == 1


def _parsed(message: bytes) -> list[_Field]:
    fields = []
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, end = _varint(message, at)
        elif wire_type == _BYTES:
            length, at = _varint(message, at)
            end = at + length
        elif wire_type in (_FIXED64, _FIXED32):
            end = at + (8 if wire_type == _FIXED64 else 4)
        else:
            raise _NotAMessageError
        if number == 0 or end > len(message):
            raise _NotAMessageError
        fields.append(_Field(number, wire_type, message[start:at], message[at:end]))
        at = end
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that starts at `at`, and the position after it."""
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(message):
            break
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise _NotAMessageError
