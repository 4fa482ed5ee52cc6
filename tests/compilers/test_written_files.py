"""A file of torch_xla that may be incomplete is not published."""

import os
from types import SimpleNamespace

import pytest

from graphstash import ClientConfig
from graphstash.hooks.torch_xla.written import WrittenFileWatcher, publish_file
from support.host import Host, key, request


@pytest.fixture
def host(tmp_path):
    with Host(ClientConfig(url="none", cache_dir=tmp_path / "cache")) as host:
        yield host


@pytest.mark.parametrize(
    ("content", "free_bytes", "is_published"),
    [(b"graph", 2**30, True), (b"", 2**30, False), (b"gra", 4096, False), (None, 2**30, False)],
    ids=["whole", "empty", "full disk", "removed"],
)
def test_only_a_file_that_is_likely_complete_is_published(
    host, tmp_path, monkeypatch, content, free_bytes, is_published
):
    """torch_xla ignores the error of a full disk and closes the incomplete file."""
    written = tmp_path / "graph"
    if content is not None:
        written.write_bytes(content)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    publish_file(written, host.cache.begin(request()), compile_seconds=1.0)
    assert host.publisher.drain(30)
    monkeypatch.undo()
    assert host.cache.is_on_this_host(key()) is is_published
    assert written.exists() is (content is not None and not is_published)


def test_watch_of_a_removed_directory_keeps_no_descriptor(tmp_path):
    directory = tmp_path / "graphs"
    directory.mkdir()
    written = WrittenFileWatcher(directory, print)
    directory.rmdir()
    written.close()
    assert written._inotify.closed
