import itertools
import os

import pytest

from support.jobs import Jobs
from support.moto import CREDENTIALS, Moto
from support.server import Server
from support.swift import Swift

_numbers = itertools.count()

# Jobs import torch and JAX hundreds of times; compiling these modules anew takes 20 s each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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


@pytest.fixture(scope="session")
def moto():
    """A quick S3; take a bucket of your own."""
    with Moto() as moto:
        yield moto


@pytest.fixture(scope="session")
def swift(tmp_path_factory):
    """A real S3; take a bucket of your own."""
    with Swift(tmp_path_factory.mktemp("swift")) as swift:
        yield swift


@pytest.fixture
def s3_credentials(monkeypatch):
    """Credentials in the environment, as users give them."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return CREDENTIALS
