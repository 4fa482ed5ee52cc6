"""A full or unwritable disk of a host causes no miss and prevents no upload."""

import errno
import io
import os
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest

from graphstash._artifacts import spill
from support.host import Host, key
from support.small_disk import SmallDisk

MIB = 1024**2
GRAPH = random.Random(0).randbytes(3 * MIB)


@pytest.fixture
def hosts(start):
    return partial(start, Host)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk with room for 1 MiB. Without permission to mount one, creating a file fails."""
    with SmallDisk(tmp_path / "disk", size_bytes=MIB) as disk:
        if not disk.is_real:
            real = os.open

            def full(path, *more, dir_fd=None, **options):
                if str(path).startswith("tmp/") and dir_fd is not None:
                    place = Path(f"/proc/self/fd/{dir_fd}").resolve()
                    if place.is_relative_to(disk.directory):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
                return real(path, *more, dir_fd=dir_fd, **options)

            monkeypatch.setattr(spill.os, "open", full)
        yield disk.directory


@pytest.fixture
def published(hosts):
    publisher = hosts("publisher")
    publisher.result = GRAPH
    publisher.build(key())
    assert publisher.stats.published == 1


@pytest.fixture(params=["directory", "small directory", "memory"])
def elsewhere(request, monkeypatch, tmp_path):
    """Where the client writes bytes that do not fit: a temporary directory, or memory."""
    if request.param == "memory":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))

    class Small(io.FileIO):
        """A file with room for 100,000 bytes."""

        def write(self, data):
            room = 100_000 - self.tell()
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:room])

    if request.param == "small directory":
        monkeypatch.setattr(
            spill, "_in_temporary_directory", lambda: Small(os.memfd_create("small"), "r+b")
        )


@pytest.mark.usefixtures("published", "elsewhere")
def test_a_full_disk_turns_no_hit_into_a_compilation(hosts, disk):
    reader = hosts("full", cache_dir=disk / "tier")
    for _ in range(2):
        assert reader.build(key()) == GRAPH
    assert reader.compiles == 0
    stats = reader.stats
    assert (stats.hits_server, stats.hits_host) == (2, 0)
    assert stats.fallbacks == {"local_io": 2}  # not stored on this host, and counted
    assert list((disk / "tier" / "tmp").iterdir()) == []


@pytest.mark.usefixtures("published")
def test_prefetch_onto_a_full_disk_fails(hosts, disk, command):
    hosts("publisher").stash.server.update_manifest("mine", [key()])
    result = command("prefetch", "mine", cache_dir=disk / "tier", status=1)
    assert f"{disk / 'tier'} did not keep {key()}: is it full?" in result.output


@pytest.mark.usefixtures("published")
def test_artifact_too_large_for_memory_is_compiled(hosts, disk, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    monkeypatch.setattr(spill, "_MAX_MEMORY_BYTES", 2 * MIB)
    reader = hosts("full", cache_dir=disk / "tier")
    reader.result = GRAPH
    assert reader.build(key()) == GRAPH
    assert reader.compiles == 1
    assert reader.stats.fallbacks["local_io"] > 0


def test_full_disk_does_not_prevent_publishing(hosts, disk, caplog):
    publisher = hosts("full", cache_dir=disk / "tier")
    publisher.result = GRAPH
    publisher.build(key())
    stats = publisher.stats
    assert (stats.published, stats.fallbacks) == (1, {"local_io": 1})
    (line,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in line
    assert "the job goes on" in line
    reader = hosts("b")
    assert reader.build(key()) == GRAPH
    assert reader.compiles == 0


@pytest.mark.parametrize("kind", ["a pseudo file system", "a file"])
def test_unusable_cache_directory_is_logged_once_and_counted(hosts, tmp_path, kind, caplog):
    place = Path("/proc/graphstash")
    if kind == "a file":
        place = tmp_path / "file"
        place.touch()
    publisher, reader = hosts("a"), hosts("b", cache_dir=place)
    publisher.build(key())
    assert publisher.stats.published == 1
    for number in range(1, 3):
        reader.build(key(number))
    stats = reader.stats
    assert (stats.hits_server, stats.published, reader.compiles) == (1, 1, 1)
    assert stats.fallbacks == {"local_io": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(place) in line
    assert "GRAPHSTASH_CACHE_DIR" in line
