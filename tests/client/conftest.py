"""Promise: a job gets verified bytes or compiles. The cache never fails a job, and every command
reports its result.

The client runs alone and against a real server.
"""

import itertools
from contextlib import ExitStack
from functools import partial

import pytest
from typer.testing import CliRunner

from graphstash import ClientConfig, Stash
from graphstash._cli.main import complete_app
from support.fault_proxy import FaultProxy
from support.signing import Team
from support.tokens import Guarded
from support.waiting import PATIENT, variables_of
from support.withdrawing import port_of, turn

_runs = itertools.count()


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    """A server that requires tokens, and its administrator."""
    with Guarded(tmp_path_factory.mktemp("guarded")) as guarded:
        yield guarded


@pytest.fixture
def later(monkeypatch):
    """See `turn`."""
    turn(monkeypatch)


@pytest.fixture
def config(server, namespace, tmp_path):
    """Return a function that makes the settings of a host of the team."""

    def make(name="host", **settings):
        usual = {"url": server.url, "namespace": namespace, "cache_dir": tmp_path / name}
        return ClientConfig.load({}, **usual | PATIENT | settings)

    return make


@pytest.fixture
def next_job(config):
    """Return a function that starts another job of a host, with its own run and an empty memory."""

    with ExitStack() as stack:

        def start(host="host", *, run="", **settings):
            name = run or f"run-{next(_runs)}"
            return stack.enter_context(Stash(config(host, **settings), run=name))

        yield start


@pytest.fixture
def start(config):
    """Return a function that starts a kind of job on a host. The job ends with the test."""
    with ExitStack() as stack:
        yield lambda kind, host="host", **settings: stack.enter_context(
            kind(config(host, **settings))
        )


@pytest.fixture
def hosts(start):
    """Return a function that makes the stash of a host of the team."""
    return partial(start, Stash)


@pytest.fixture
def proxy(server):
    """A proxy in front of the shared server that fails on demand."""
    with FaultProxy(port_of(server)) as proxy:
        yield proxy


@pytest.fixture
def team(tmp_path):
    (tmp_path / "keys").mkdir()
    return Team(tmp_path / "keys")


@pytest.fixture
def command(config):
    """Return a function that runs a command on a host, in this process."""

    def run(*arguments, host="reader", status=0, **settings):
        variables = variables_of(config(host))
        variables |= {f"GRAPHSTASH_{name.upper()}": str(settings[name]) for name in settings}
        result = CliRunner().invoke(complete_app(), list(map(str, arguments)), env=variables)
        assert result.exit_code == status, result.output
        return result

    return run
