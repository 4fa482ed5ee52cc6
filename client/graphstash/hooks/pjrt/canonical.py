"""Canonical form of compile options: sort the entries of protobuf maps, and change nothing else.

Compile options are a protobuf message. Protobuf serializes the entries of a map in a different
order in each process, so a key of the raw bytes would not hit. A serialized map is a run of fields
with one number, each a message of exactly two fields, 1 (the key) and 2 (the value), both of which
writers always write (https://protobuf.dev/programming-guides/encoding/#maps). Only such runs are
sorted, and only if their keys have one type and none repeats. Other sequences, whose order matters,
do not match: the devices of a device assignment, for example, are messages of one field.

No schema is needed, so messages of a newer XLA work. Bytes that do not parse stay unchanged.
"""

from typing import Final

from graphstash.hooks.protobuf import BYTES, Field, NotAMessageError, fields_of

__all__ = ["canonicalize"]

_MAX_DEPTH: Final = 32
"""Nesting of messages down to which maps are sorted. Protobuf's own limit is 100."""


def canonicalize(message: bytes) -> bytes:
    """Return the message with the entries of every map sorted. The length stays the same."""
    return _canonicalize(message, depth=0)


def _canonicalize(message: bytes, *, depth: int) -> bytes:
    try:
        fields = fields_of(message)
    except NotAMessageError:
        return message
    if depth < _MAX_DEPTH:
        fields = [
            field._replace(body=_canonicalize(field.body, depth=depth + 1))
            if field.wire_type == BYTES
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


def _is_map(run: list[Field]) -> bool:
    keys = set()
    for field in run:
        if field.wire_type != BYTES:
            return False
        try:
            entry = fields_of(field.body)
        except NotAMessageError:
            return False
        if [part.number for part in entry] != [1, 2]:
            return False
        keys.add((entry[0].wire_type, entry[0].body))
    return len(keys) == len(run) and len({wire_type for wire_type, _ in keys}) == 1
