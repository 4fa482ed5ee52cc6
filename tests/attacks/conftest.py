"""Promise: no attack changes a server's data, reads data beyond its rights, or makes a job run
bytes that the team did not publish. The server counts each refusal.

Servers and jobs are real.
"""

import itertools
from contextlib import ExitStack

import pytest

from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.guarded_server import DEVICE, GuardedServer, fingerprint
from support.hostile import Middlebox
from support.reader_job import ReaderJob
from support.signing import Team, sealed, signature_of

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def fort(start_on_sqlite):
    """A server process shared by all attacks that do not depend on the database."""
    return start_on_sqlite(GuardedServer)


@pytest.fixture(scope="session")
def any_fort(start_once):
    """A server process on each database."""
    return start_once(GuardedServer)


@pytest.fixture
def space():
    return f"attack-{next(_NUMBERS)}"


@pytest.fixture
def key():
    def make(number=0, *, kind="jax", device=DEVICE):
        return ArtifactKey.parse(kind, device, fingerprint(number))

    return make


@pytest.fixture
def team(tmp_path):
    (tmp_path / "keys").mkdir()
    return Team(tmp_path / "keys")


@pytest.fixture
def victim(fort, space, tmp_path):
    """Start training jobs for a test to attack."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(**settings):
            """Start a job that may only read, unless a token is given."""
            if "token" not in settings:
                settings |= {"token": fort.token(f"read:{space}"), "read_only": True}
            own = {"namespace": space, "cache_dir": tmp_path / f"job-{next(numbers)}"}
            return stack.enter_context(ReaderJob(**{"url": fort.url} | own | settings))

        yield start


@pytest.fixture
def middlebox(fort):
    """Start a hostile proxy in front of the real server."""
    with ExitStack() as stack:
        yield lambda change=None, **keywords: stack.enter_context(
            Middlebox(fort.url, change, **keywords)
        )


@pytest.fixture
def publish(fort, space, tmp_path):
    """Publish a payload like an honest job, signed if a key is given. Return the envelope."""

    def put(key, payload, *, signing_key=None, namespace=None, server=fort, directory=tmp_path):
        where = namespace or space
        envelope = sealed(directory, key, payload, name=f"{where}-{key.fingerprint[:8]}-{key.kind}")
        signature = signature_of(signing_key, where, key, envelope) if signing_key else None
        metadata = ArtifactMetadata(
            compile_seconds=30.0, raw_size_bytes=envelope.raw_size_bytes, signature=signature
        )
        answer = server.put(key.artifact_path(where), envelope.path.read_bytes(), metadata=metadata)
        assert answer.status_code == 201, answer.text
        return envelope

    return put
