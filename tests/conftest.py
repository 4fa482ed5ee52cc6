import itertools
import os

import pytest

from support.jobs import Jobs
from support.server import Server

_numbers = itertools.count()

# Otherwise torch starts a process per core that compiles, whether anything is compiled or not.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in tuple(os.environ):
        if name.startswith("GRAPHSTASH_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One real server for all tests that do not hurt it; take a `namespace` of your own."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def namespace():
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def jobs():
    """Starts real training jobs."""
    jobs = Jobs()
    yield jobs
    jobs.close()
