"""Another user of the server's host cannot read the files of the server."""

import os
import stat

import pytest

from graphstash_server.testing import ServerProcess
from support.guarded_server import GuardedServer

_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_CREATES_DATABASE = {"GRAPHSTASH_AUTO_MIGRATE": "true"}


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(directory):
    """Return the paths that a user without rights can reach, from the directory down."""
    found = []
    if directory.stat().st_mode & _OF_OTHERS:
        found = [directory]
        for path in directory.iterdir():
            if path.is_dir():
                found += open_to_others(path)
            elif path.stat().st_mode & _OF_OTHERS:
                found.append(path)
    return found


def test_database_and_blobs_are_closed_to_other_users(tmp_path, space):
    """This holds for a new server, and for files that an earlier release left readable."""
    with GuardedServer(tmp_path / "server", auto_migrate=True) as fort:
        fort.fill(space, 0, 1)
        files = [path for path in fort.data_dir.rglob("*") if path.is_file()]
        assert open_to_others(fort.data_dir) == []
    assert {"graphstash.sqlite3", "graphstash.sqlite3-wal"} <= {path.name for path in files}
    data_dir = fort.data_dir
    paths = [data_dir, *data_dir.rglob("*")]
    for path in paths:
        if path in [data_dir, *files]:
            assert path.stat().st_mode & _OF_OTHERS == 0, path
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert set(open_to_others(data_dir)) == set(paths)

    with ServerProcess(data_dir):
        assert open_to_others(data_dir) == []
        own = [path for path in data_dir.iterdir() if path.stat().st_mode & _OF_OTHERS]
        assert own == []


def test_open_data_directory_with_other_files_is_reported_and_stays_open(tmp_path):
    """The server closes only files that it made. It warns that others may replace the database."""
    data_dir = tmp_path / "shared"
    data_dir.mkdir()
    (data_dir / "of somebody else").write_text("x")
    data_dir.chmod(0o777)

    with ServerProcess(data_dir, environment=_CREATES_DATABASE) as server:
        theirs = open_to_others(data_dir)
        assert "chmod go-w" in server.log
    assert theirs == [data_dir, data_dir / "of somebody else"]
