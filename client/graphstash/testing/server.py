"""FakeServer: the interface that tests use."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, get_args

from graphstash.testing.failures import Call, Failure, Fault, ServerCall, StoredArtifact
from graphstash_schema import ArtifactKey
from graphstash_schema.run import RunReport

if TYPE_CHECKING:
    from graphstash import ClientConfig

__all__ = ["FakeServer"]

_MAX_CALLS: Final = 100_000


class FakeServer:
    """A graphstash server for tests, on a free loopback port. Thread-safe.

    Use it as a context manager, or call `start` and `close`. Its data is in a temporary directory.

    It is the real server with default settings, behind a layer that records calls and can make them
    fail. It never evicts.

    Args:
        token: bearer token that clients must present. None requires no token.
        max_bytes: limit for all artifacts together. Beyond it, the server refuses uploads with 507.

    Attributes:
        url: `GRAPHSTASH_URL` for the code under test.

    Raises:
        ModuleNotFoundError: graphstash was installed without the extra `server`.
    """

    def __init__(self, *, token: str | None = None, max_bytes: int = 256 * 1024**2) -> None:
        try:
            from graphstash.testing.real import RealServer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"FakeServer runs the real server, and {error.name} is missing: "
                "pip install 'graphstash[server] @ git+<repository>'",
                name=error.name,
            ) from error
        self._token = token
        self._calls: deque[Call] = deque(maxlen=_MAX_CALLS)
        self._failures: deque[Failure] = deque()
        self._real = RealServer(token=token, max_bytes=max_bytes, record=self._record)
        self.url = f"http://127.0.0.1:{self._real.port}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start serving in the background. Entering the context manager does the same.

        Raises:
            RuntimeError: the server was closed, or does not start.
        """
        self._real.start()
        return self

    def close(self) -> None:
        """Close every connection and end every thread. Further calls cannot connect.

        Recorded calls and stored artifacts stay readable. Closing twice does nothing.
        """
        self._real.close()

    def config(self, *, cache_dir: Path, **settings: Any) -> "ClientConfig":
        """Return client settings for this server, independent of the environment.

        Args:
            cache_dir: the client's local tier. Give each simulated host its own directory: a client
                does not fetch artifacts that are on disk already.
            settings: further fields of `ClientConfig`.
        """
        from graphstash import ClientConfig

        ours = {"url": self.url, "token": self._token, "cache_dir": cache_dir}
        return ClientConfig.load({}, **(ours | settings))

    def environment(self, *, cache_dir: Path) -> dict[str, str]:
        """Return environment variables that make a subprocess use this server, as in `config`."""
        variables = {"GRAPHSTASH_URL": self.url, "GRAPHSTASH_CACHE_DIR": str(cache_dir)}
        return variables | ({"GRAPHSTASH_TOKEN": self._token} if self._token else {})

    def fail_on(
        self,
        *operations: ServerCall,
        fault: Fault | None = None,
        status: int = 500,
        times: int | None = None,
        namespace: str | None = None,
        kind: str | None = None,
        key: ArtifactKey | None = None,
    ) -> Failure:
        """Make matching calls fail from now on.

        If several failures match a call, the earliest applies until it has failed `times` calls. A
        call that fails with a status or a `reset` changes nothing on the server.

            server.fail_on("get", times=2)                      two downloads get a 500
            server.fail_on(status=503)                          the server is overloaded
            server.fail_on("get", fault="flip", kind="triton")  Triton's kernels arrive damaged
            with server.fail_on("put", fault="hang") as failure:
                start_job()
                failure.wait()                                  an upload hangs now

        Args:
            operations: calls that fail. None given means every call.
            fault: kind of failure. None means an error response with `status`.
            status: HTTP status from 400 to 599, used without `fault`. 429 and 503 carry
                `Retry-After: 1`.
            times: number of calls that fail. None means all until the failure is removed.
            namespace: only calls in this namespace fail.
            kind: only calls on one artifact of this kind fail.
            key: only calls on the artifact with this key fail.

        Returns:
            The failure, which counts its calls and can be waited for and removed.

        Raises:
            ValueError: unknown operation or fault, or a status or number of times out of range.
        """
        if unknown := set(operations) - set(get_args(ServerCall)):
            raise ValueError(f"unknown operation {unknown}: use {', '.join(get_args(ServerCall))}")
        if fault is not None and fault not in get_args(Fault):
            raise ValueError(f"unknown fault {fault!r}: use {', '.join(get_args(Fault))}")
        if not 400 <= status <= 599:
            raise ValueError(f"status must be from 400 to 599 (got {status})")
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1 (got {times})")
        failure = Failure(
            operations=frozenset(operations),
            fault=fault,
            status=status,
            times=times,
            namespace=namespace,
            kind=kind,
            key=key,
        )
        self._failures.append(failure)
        return failure

    def recover(self) -> None:
        """End all failures. The server now answers hanging calls."""
        while self._failures:
            self._failures.popleft().remove()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The last 100,000 calls, oldest first."""
        return tuple(self._calls)

    def count(
        self,
        operation: ServerCall | None = None,
        *,
        namespace: str | None = None,
        key: ArtifactKey | None = None,
    ) -> int:
        """Return how many of `calls` match the arguments, including failed calls."""
        return sum(
            operation in (None, call.operation)
            and namespace in (None, call.namespace)
            and key in (None, call.key)
            for call in self.calls
        )

    @property
    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """All stored artifacts, oldest first, including withheld artifacts."""
        return self._real.artifacts()

    @property
    def reports(self) -> tuple[RunReport, ...]:
        """The newest report of each process, oldest first."""
        return self._real.reports()

    def clear(self) -> None:
        """Remove all artifacts, leases, manifests, reports, calls and failures. Keep serving."""
        self.recover()
        self._real.clear()
        self._calls.clear()

    def _record(self, call: Call) -> Failure | None:
        failures = tuple(self._failures)
        failure = next((each for each in failures if each.applies_to(call)), None)
        self._calls.append(replace(call, failure=failure))
        return failure
