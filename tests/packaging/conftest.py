"""Promise: sdist and wheel install, each extra works alone, and an upgrade keeps all data."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.postgres import EMPTY

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    if request.param == "sqlite":
        return {}
    return {"database_url": request.getfixturevalue("postgres").new_database(template=EMPTY)}


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """The output of `make dist`: an sdist, and a wheel built from the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", directory, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def wheel(dist):
    (wheel,) = dist.glob("*.whl")
    return wheel
