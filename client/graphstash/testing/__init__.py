"""A graphstash server for tests, in a thread of this process, with injectable failures.

    from graphstash.testing import FakeServer

    def test_training_continues_when_the_cache_fails(tmp_path):
        with FakeServer() as server:
            server.fail_on("get", status=503, times=2)
            variables = os.environ | server.environment(cache_dir=tmp_path)
            subprocess.run([sys.executable, "train.py"], env=variables, check=True)
            assert server.count("put") == 1

It is the real server on a loopback port, with a temporary data directory. It needs the extra
`server`.
"""

from typing import TYPE_CHECKING, Any

from graphstash.testing.failures import Call, Failure, Fault, ServerCall, StoredArtifact

if TYPE_CHECKING:
    from graphstash.testing.server import FakeServer

__all__ = ["Call", "Failure", "FakeServer", "Fault", "ServerCall", "StoredArtifact"]


def __getattr__(name: str) -> Any:
    if name != "FakeServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from graphstash.testing.server import FakeServer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"FakeServer runs the real server, and {error.name} is missing: "
            "pip install 'graphstash[server] @ git+<repository>'",
            name=error.name,
        ) from error
    return FakeServer
