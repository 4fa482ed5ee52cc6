"""graphstash server for tests, in this process and on loopback, with injectable failures.

    from graphstash.testing import FakeServer

    def test_training_continues_when_the_cache_fails(tmp_path):
        with FakeServer() as server:
            server.fail_on("get", status=503, times=2)
            variables = os.environ | server.environment(cache_dir=tmp_path)
            subprocess.run([sys.executable, "train.py"], env=variables, check=True)
            assert server.count("put") == 1

As a pytest fixture:

    @pytest.fixture
    def cache_server():
        with FakeServer() as server:
            yield server

It is the real server with a temporary directory, so it needs the extra `server`. It uses real HTTP,
so that the code under test may run in a subprocess without patches.
"""

from graphstash.testing.failures import Call, Failure, Fault, ServerCall, StoredArtifact
from graphstash.testing.server import FakeServer

__all__ = ["Call", "Failure", "FakeServer", "Fault", "ServerCall", "StoredArtifact"]
