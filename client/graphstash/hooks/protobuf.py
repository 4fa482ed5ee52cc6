"""The fields of serialized protobuf messages, without their schemas."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

__all__ = ["BYTES", "Field", "NotAMessageError", "fields_of", "texts_in"]

_VARINT: Final = 0
_FIXED64: Final = 1
BYTES: Final = 2
_FIXED32: Final = 5

_MAX_VARINT_BYTES: Final = 10

_MAX_TEXT_BYTES: Final = 4096
_MAX_MESSAGE_BYTES: Final = 64 * 1024


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        head: Bytes of the tag and, if the field has a length, of the length.
        body: Bytes of the value.
    """

    number: int
    wire_type: int
    head: bytes
    body: bytes


class NotAMessageError(Exception):
    """The bytes are not a protobuf message. They are text, packed numbers, or damaged."""


def fields_of(message: bytes) -> list[Field]:
    """Return the fields of a message in order.

    Raises:
        NotAMessageError: The bytes are not a message.
    """
    fields = []
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, end = _read_varint(message, at)
        elif wire_type == BYTES:
            length, at = _read_varint(message, at)
            end = at + length
        elif wire_type in (_FIXED64, _FIXED32):
            end = at + (8 if wire_type == _FIXED64 else 4)
        else:
            raise NotAMessageError
        if number == 0 or end > len(message):
            raise NotAMessageError
        fields.append(Field(number, wire_type, message[start:at], message[at:end]))
        at = end
    return fields


def texts_in(message: bytes, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the short texts in a message and in the messages inside it, each with its place.

    A place is the numbers of the fields that lead to the text, such as `3.3.61`. A text may also be
    a short message that is valid UTF-8.
    """
    with suppress(NotAMessageError):
        for field in fields_of(message):
            if field.wire_type == BYTES:
                inner = f"{place}.{field.number}" if place else f"{field.number}"
                if 0 < len(field.body) <= _MAX_TEXT_BYTES:
                    with suppress(UnicodeDecodeError):
                        yield inner, field.body.decode()
                if len(field.body) <= _MAX_MESSAGE_BYTES:
                    yield from texts_in(field.body, inner)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that starts at `at`, and the position after it."""
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(message):
            break
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise NotAMessageError
