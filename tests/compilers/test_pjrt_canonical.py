"""The canonical form of compile options and descriptions. Most messages are written by hand."""

import base64
import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash.hooks.pjrt.canonical import canonicalize
from graphstash.hooks.pjrt.fingerprint import digest_of


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
    """Draw two messages with nested maps that differ only in the order of map entries."""
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
    assert canonicalize(one) == canonicalize(other)


@given(tables, tables)
def test_different_contents_stay_different(one, other):
    written = [canonicalize(text(3, mapping(216, table.items()))) for table in (one, other)]
    assert (written[0] == written[1]) == (one == other)


@given(st.binary(max_size=200))
def test_canonical_form_of_any_bytes_keeps_the_length_and_is_idempotent(message):
    once = canonicalize(message)
    assert sorted(once) == sorted(message)
    assert canonicalize(once) == once


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 12,  # an endless number
        b"\x0a\x7fshort",  # shorter than its length field
        b"\x0b\x0c",  # groups, which protobuf dropped
        b"\x02\x00",  # field 0
        mapping(5, [(b"b", b"1"), (b"a", b"2")]) + b"\x80",  # a truncated message
    ],
)
def test_bytes_that_are_no_message_are_returned_unchanged(garbage):
    assert canonicalize(garbage) == garbage


@pytest.mark.parametrize(
    "sequence",
    [
        [text(1, b"\x01\x02"), text(1, b"\x00\x03")],  # a device assignment: one field each
        [integer(1, 3) + integer(2, 0), integer(1, 3) + integer(2, 1)],  # a duplicate key
        [integer(2, 7) + integer(1, 3), integer(2, 6) + integer(1, 2)],  # value before key
        [entry(b"b", b"x") + integer(3, 1), entry(b"a", b"x") + integer(3, 1)],
        [integer(1, 9) + integer(2, 1), text(1, b"a") + integer(2, 1)],  # keys of two types
    ],
)
def test_sequences_whose_order_may_matter_keep_it(sequence):
    message = b"".join(text(4, element) for element in sequence)
    assert canonicalize(message) == message
    assert canonicalize(message) != canonicalize(b"".join(text(4, each) for each in sequence[::-1]))


# Serialized by JAX 0.11.2 for one NVIDIA H100, in two processes.
H100 = [
    (
        "c-nQ7&ubGw6vvtACT=z+gs5~Y3ZoW`(5$nYA8v}+WK(EbZ7HJSMe3TYap~^Pl4NP(X)OK$;;9Hi6%VBc5ig4LP&}"
        "2ML{C~o@gzNo7eSCXiwUGleej0&dEf6F-eHD+a&LY2!^Yaj@g!IEYWmS5bJwOPr%R|JV~kWhrJ;&8o0<6)7E-N_Y"
        "e;oM>XxCqW>cyX`)u3Nr773DLR?~zdS|{tS|qt0{?9cCqyPq5Hze$Yc*-Y`Na+xwtML>~;QK(Opx9+`pwjIQ&9l5"
        "t>6hnQ`b|pdi2cm{GvQLYxw8S=bS1tFI6fl62Y^y;#Xp{c8$yidl98D2OcX`HkRQZ2FC>M3NP!3$M+ex~6MOU+e{"
        "f)Y9dv!mFtfZ$?@lB*k@ABUPDD&Tu}6;crve-f@bLgg2N?D?>NCe!4ERR_ECl?A0{TdRVSo<@_}C!70bw~KVF|wl"
        "k(`PpIaiRf+x_PIe(?!}3zA%r@HY_3NQ#7if@JSKlu5%S4ZUR&=QkKG6WjG#1}f{We#^AXRtK>ueHlj2drr-`Z8}"
        "En!b7<KV|oM^n)ZV4M@wew4pMViK9?<IayYA@%ca>dBxe*<B@Ls=%7ThnT&&zhRf|*?$B>ej3%!nQ*!^x!$to(dY"
        "Uq+Ox(d7f0Bex)FIc{Y#Z6e;g47TA4ua3{<>S-EuT1(5(GR~5PIBd|lcn+f*VZ5(n>izhZ8g7;&!#<R(IHDt+A<x"
        "lovu4xGG^FDL$_)T_Q`6^zlJjY%m"
    ),
    (
        "c-nQ-&1(}u6aa8$x`~sm2_Y)oio&P`BQ)!5zT6bC`6x84wiHqEB5_UDxO8`CNp@-CX)OK$;;9Hi6%VBc5ig4LP&}"
        "2ML{C~o@gzNo7eSCX!35H!KA2^G@4bCHhgtOG-umu`jkS*xF`??!w4+Dnugy%&6mVG~1gm7ah|9&f)a<XI7<b!_F"
        "4rloo4V#0O}R>~vn^ATrycJKb*M?}?S%$)X>2?ApD`H30RhEMK->u+hN4(vYzVW}NSsB<eV{Us@9;QK?sSG0_`1&"
        "6m*-pBO~%-$_00J*=`gmrvjJOdC9(_z6q4Wrz?iVoeLMv>#0U~&Vz}EGWk7=5!vh9l7@=6`pYxm%6y4JvMh6GWVI"
        "&N29dtl%;H$*$WK@tC>`mxf;FboAxW{}R+2esP3KHh!6TbFSJ_mh1?(<=vkNGV6j(f;gAN3gy`V9ywDVfOREeK^)"
        "A}g7koZjvy-}g74KrkmOIhlL|fs~w-$xjgL-G>rwIJBX;2DN{KkrK5W&((2BbF^EAX}E37-_n-h@OjU!>9-AAuU&"
        "Wu_rFY!V5MnQy8U>`aPMF>LzHvrTq;A-MSQt1H;$E55?5(MZ}M$UB|I*c@8YUStBd0}nN@PVjHO%sY$lmbs=T#`F"
        "D1uTVW%Hp4KnnCuh%fY3G-W!bpyVG;4^&r_;mg&FMWsjM>h{n3Z<)4g^B%-U4$q+dq$L6YPOP1Cp>%6rb~9hG;FV"
        "xsM}sFtXq0RGiwe0lhvAk0g8qG%m"
    ),
]


def test_description_of_a_gpu_is_the_same_in_every_process():
    one, other = (zlib.decompress(base64.b85decode(each)) for each in H100)
    assert hashlib.sha256(one).digest() != hashlib.sha256(other).digest()
    assert digest_of(one) == digest_of(other)
    assert digest_of(one) != digest_of(one.replace(b"H100", b"H200"))
