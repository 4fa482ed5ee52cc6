from contextlib import ExitStack

import pytest

from graphstash import ClientConfig, Stash
from support.signing import Team


@pytest.fixture
def config(server, namespace, tmp_path):
    """Makes settings of different hosts of one team."""

    def make(name="host", **settings):
        usual = {"url": server.url, "namespace": namespace, "cache_dir": tmp_path / name}
        return ClientConfig.load({}, **usual | settings)

    return make


@pytest.fixture
def hosts(config):
    """Makes stashes that stand for different hosts of one team."""
    with ExitStack() as stack:
        yield lambda name="host", **settings: stack.enter_context(Stash(config(name, **settings)))


@pytest.fixture
def team(tmp_path):
    (tmp_path / "keys").mkdir()
    return Team(tmp_path / "keys")
