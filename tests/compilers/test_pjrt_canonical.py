"""Compile options in one form; the messages are written by hand, as protobuf writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash.hooks.pjrt.canonical import canonical


def varint(number):
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def text(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def integer(number, value):
    return varint(number << 3) + varint(value)


def entry(key, value):
    return text(1, key) + text(2, value)


def mapping(number, pairs):
    return b"".join(text(number, entry(*pair)) for pair in pairs)


words = st.text(max_size=12).map(str.encode)
tables = st.dictionaries(words, words, max_size=6)
others = st.one_of(
    st.builds(integer, st.integers(1, 600), st.integers(0, 2**63 - 1)),
    st.builds(text, st.integers(601, 900), words),
).map(lambda field: [field])


@st.composite
def permuted(draw):
    """Two messages with maps at several depths, which differ in the order of entries alone."""
    inner, outer = draw(tables), draw(tables)
    before, between = b"".join(draw(others)), b"".join(draw(others))

    def message():
        nested = before + mapping(1000, draw(st.permutations(list(inner.items()))))
        deeper = text(1001, text(1002, nested + between))
        return deeper + mapping(1003, draw(st.permutations(list(outer.items()))))

    return message(), message()


@given(permuted())
def test_the_order_of_map_entries_does_not_matter(messages):
    one, other = messages
    assert canonical(one) == canonical(other)


@given(tables, tables)
def test_different_contents_stay_different(one, other):
    written = [canonical(text(3, mapping(216, table.items()))) for table in (one, other)]
    assert (written[0] == written[1]) == (one == other)


@given(st.binary(max_size=200))
def test_any_bytes_keep_their_length_and_are_done_in_one_pass(message):
    once = canonical(message)
    assert sorted(once) == sorted(message)
    assert canonical(once) == once


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 12,  # a number without an end
        b"\x0a\x7fshort",  # longer than what is there
        b"\x0b\x0c",  # groups, which protobuf dropped
        b"\x02\x00",  # field 0
        mapping(5, [(b"b", b"1"), (b"a", b"2")]) + b"\x80",  # a message that is cut
    ],
)
def test_bytes_that_are_no_message_are_returned_unchanged(garbage):
    assert canonical(garbage) == garbage


@pytest.mark.parametrize(
    "sequence",
    [
        [text(1, b"\x01\x02"), text(1, b"\x00\x03")],  # a device assignment: one field each
        [integer(1, 3) + integer(2, 0), integer(1, 3) + integer(2, 1)],  # a key twice
        [integer(2, 7) + integer(1, 3), integer(2, 6) + integer(1, 2)],  # not key, value
        [entry(b"b", b"x") + integer(3, 1), entry(b"a", b"x") + integer(3, 1)],
        [integer(1, 9) + integer(2, 1), text(1, b"a") + integer(2, 1)],  # keys of two types
    ],
)
def test_sequences_whose_order_may_matter_keep_it(sequence):
    message = b"".join(text(4, element) for element in sequence)
    assert canonical(message) == message
    assert canonical(message) != canonical(b"".join(text(4, each) for each in sequence[::-1]))
