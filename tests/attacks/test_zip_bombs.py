"""An artifact that decompresses to gigabytes costs a job bounded memory."""

from dataclasses import asdict

import pytest

from graphstash_schema import ArtifactMetadata
from support.bombs import GIANT_BYTES, bomb, count_decompressors, envelope_of, frame
from support.reader_job import OWN
from support.run_case import RUN_CASE, case_arguments


@pytest.fixture
def decompressors(monkeypatch):
    return count_decompressors(monkeypatch)


@pytest.fixture
def plant(fort, space):
    """Upload a blob as a writer. The server never decompresses one."""

    def put(key, blob, *, signature=None):
        metadata = ArtifactMetadata(compile_seconds=30, raw_size_bytes=10, signature=signature)
        answer = fort.put(key.artifact_path(space), blob, metadata=metadata)
        assert answer.status_code == 201, answer.text

    return put


def refuses(fort, job, key, reason):
    with fort.withstands() as refused:
        assert job.build(key) == OWN
        assert job.fallbacks == {reason: 1}
    assert refused == {}


@pytest.mark.parametrize(
    ("fields", "reason", "unfolded"),
    [
        ({}, "corrupt", True),
        ({"raw_size": GIANT_BYTES + 1}, "too_large", False),
        ({"raw_size": 1e300}, "too_large", False),
        ({"raw_size": float("inf")}, "corrupt", False),
    ],
    ids=str,
)
def test_bomb_is_refused(fort, key, plant, victim, decompressors, fields, reason, unfolded):
    """The job checks no signatures. It decompresses no further than the declared size."""
    plant(key(), bomb(key(), **fields))

    refuses(fort, victim(), key(), reason)
    assert bool(decompressors) == unfolded


def test_frame_with_a_window_of_2_gigabytes_is_refused(fort, key, plant, victim):
    plant(key(), envelope_of(key(), frame(GIANT_BYTES, window_log=31)))

    refuses(fort, victim(), key(), "corrupt")


def test_bomb_grows_the_process_by_bounded_memory(fort, space, key, plant, publish, tmp_path, jobs):
    plant(key(1), bomb(key(1), raw_size=GIANT_BYTES - 1))
    plant(key(2), bomb(key(2), raw_size=32 * 1024**2))  # its declared size is false
    publish(key(0), OWN)
    settings = {
        "url": fort.url,
        "namespace": space,
        "token": fort.token(f"read:{space}"),
        "read_only": True,
        "cache_dir": str(tmp_path / "job"),
        "max_artifact": 64 * 1024**2,
    }
    keys = [asdict(key(number)) for number in range(3)]

    with fort.withstands() as refused:
        arguments = case_arguments("bombs:costs_of", settings=settings, keys=keys)
        started = jobs.start(tmp_path / "host", *arguments, script=RUN_CASE, under="python")
        small, *bombs = started.finish().report
    assert small["fallbacks"] == {}
    assert [each["fallbacks"] for each in bombs] == [{"too_large": 1}, {"corrupt": 1}]
    assert all(each["grown"] < 64 * 1024**2 for each in bombs)
    assert refused == {}
