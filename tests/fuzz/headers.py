"""Headers: each is parsed, ignored or refused with a 4xx, and parsed values are in range."""

import base64

from harness import Data, instrumented, main

with instrumented():
    from graphstash_schema import ArtifactMetadata, Digest, InvalidValueError
    from graphstash_schema.access import TOKEN_FORM
    from graphstash_schema.errors import STATUS
    from graphstash_schema.metadata import MAX_COMPILE_SECONDS
    from graphstash_schema.protocol import MAX_METADATA_BYTES
    from graphstash_server.errors import ServerError
    from graphstash_server.reading.conditions import lists_etag, requested_range, requested_wait

_DIGEST = Digest.of(b"x")
_RECORD = ArtifactMetadata(
    compile_seconds=1.5, raw_size_bytes=7, toolchain="jax 0.6", producer="a@b", parts={"a": "b"}
)
SEEDS = (
    b"\x00bytes=0-9",
    b"\x01bytes=-5",
    b'\x02W/"a", ' + _DIGEST.etag.encode(),
    b"\x03respond-async, wait=10; x",
    b"\x04" + _DIGEST.repr_digest.encode(),
    b"\x05" + _RECORD.to_header().encode(),
    b"\x06gst_" + b"a" * 16 + b"_" + b"B" * 43,
)


def check(data: bytes) -> None:
    if not data:
        return
    text = data[1:].decode("latin-1")  # like the HTTP parser
    _CHECKS[data[0] % len(_CHECKS)](text)


def _check_range(text: str) -> None:
    source = Data(text.encode("latin-1"))
    size_bytes = source.ConsumeIntInRange(0, 2**40)
    for asked in (text, f"bytes={text}"):
        try:
            span = requested_range(asked, None, etag=_DIGEST.etag, size_bytes=size_bytes)
        except ServerError as error:
            assert error.status == 416
            continue
        if span is not None:
            start, stop = span
            assert 0 <= start < stop <= size_bytes


def _check_if_range(text: str) -> None:
    span = requested_range("bytes=0-0", text, etag=_DIGEST.etag, size_bytes=10)
    assert (span is not None) == (text.strip() == _DIGEST.etag)


def _check_etags(text: str) -> None:
    if lists_etag(text, _DIGEST.etag):
        assert text.strip() == "*" or _DIGEST.etag in text


def _check_wait(text: str) -> None:
    for asked in (text, f"wait={text}"):
        seconds = requested_wait(asked, at_most_seconds=60)
        assert seconds is None or 0 <= seconds <= 60


def _check_digest(text: str) -> None:
    for given in (text, f"sha-256=:{text}:"):
        try:
            digest = Digest.parse_repr_digest(given, size_bytes=3)
        except InvalidValueError as error:
            assert STATUS[error.code] == 400
            continue
        assert Digest.parse_repr_digest(digest.repr_digest, size_bytes=3) == digest
        assert digest.repr_digest.removesuffix(":").removeprefix("sha-256=:") in given


def _check_metadata(text: str) -> None:
    encoded = base64.urlsafe_b64encode(text.encode("latin-1")).rstrip(b"=").decode()
    for given in (text, encoded):
        try:
            record = ArtifactMetadata.from_header(given)
        except InvalidValueError as error:
            assert STATUS[error.code] == 400
            assert len(str(error)) < 2000
            continue
        assert 0 <= record.compile_seconds <= MAX_COMPILE_SECONDS
        assert record.raw_size_bytes >= 0
        assert all(ord(each) >= 32 for each in record.producer + record.toolchain)
        header = record.to_header()
        assert len(header) <= MAX_METADATA_BYTES
        again = ArtifactMetadata.from_header(header)
        assert again.signature == record.signature
        assert set(again.parts.items()) <= set(record.parts.items())


def _check_token(text: str) -> None:
    match = TOKEN_FORM.fullmatch(text)
    if match is not None:
        assert text == f"gst_{match['id']}_{match['secret']}"
        assert len(text) == 64
        assert text.isascii()


_CHECKS = (
    _check_range,
    _check_if_range,
    _check_etags,
    _check_wait,
    _check_digest,
    _check_metadata,
    _check_token,
)


if __name__ == "__main__":
    main(check, seeds=SEEDS)
