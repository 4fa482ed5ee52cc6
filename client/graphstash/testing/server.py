"""The server as a test sees it."""

import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, get_args

from graphstash.testing.failures import Call, Failure, Fault, ServerCall
from graphstash.testing.http import CLOSE_SECONDS, HttpServer
from graphstash.testing.store import POLL_SECONDS, Store, StoredArtifact
from graphstash_schema import ArtifactKey
from graphstash_schema.run import RunReport

if TYPE_CHECKING:
    from graphstash import ClientConfig

__all__ = ["FakeServer"]

_MAX_CALLS: Final = 100_000


class FakeServer:
    """An in-memory graphstash server for tests, on a free loopback port.

    Use it as a context manager, or call `start` and `close`. It keeps the rules of a real server
    with default settings: the first artifact of a key stays, leases are exclusive and expire,
    reported artifacts are withheld, manifests merge, runs are the sums of their processes. Nothing
    is evicted, byte ranges are ignored, misses are not explained, and there are no history and no
    namespace policies. Everything is lost with the object. Safe for many threads.

    Args:
        token: the bearer token that clients must present; None requires none.
        max_bytes: limit for all artifacts together; further uploads are refused with 507.

    Attributes:
        url: the `GRAPHSTASH_URL` of the code under test.
    """

    def __init__(self, *, token: str | None = None, max_bytes: int = 256 * 1024**2) -> None:
        self._token = token
        self._store = Store(max_bytes)
        self._calls: deque[Call] = deque(maxlen=_MAX_CALLS)
        self._failures: deque[Failure] = deque()
        self._http = HttpServer(self._store, token=token, record=self._record)
        self._thread: threading.Thread | None = None
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Starts serving in the background; entering the context manager does this, too."""
        if self._thread is None:
            serve = self._http.serve_forever
            self._thread = threading.Thread(target=serve, args=(POLL_SECONDS,), daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends every connection and thread; further calls cannot connect.

        Recorded calls and stored artifacts can still be read. Closing it again does nothing.
        """
        self._store.close()
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join(CLOSE_SECONDS)
            self._thread = None
        self._http.close()

    def config(self, *, cache_dir: Path, **settings: Any) -> "ClientConfig":
        """Settings for a client of this server; the environment is not read.

        Args:
            cache_dir: the client's local tier. Give each simulated host its own directory: what is
                on disk already is not fetched from the server.
            settings: further fields of `ClientConfig`.
        """
        from graphstash import ClientConfig

        ours = {"url": self.url, "token": self._token, "cache_dir": cache_dir}
        return ClientConfig.load({}, **(ours | settings))

    def environment(self, *, cache_dir: Path) -> dict[str, str]:
        """Environment variables that make a subprocess use this server, see `config`."""
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
        """Makes calls fail from now on.

        If several failures match a call, the one that was set up first is used until its `times`
        are over. A call that fails with a status or a `reset` changes nothing on the server.

            server.fail_on("get", times=2)                      two downloads get a 500
            server.fail_on(status=503)                          the server is overloaded
            server.fail_on("get", fault="flip", kind="triton")  Triton's kernels arrive damaged
            with server.fail_on("put", fault="hang") as failure:
                start_job()
                failure.wait()                                  an upload hangs now

        Args:
            operations: which calls; none means all of them.
            fault: how they fail; None answers with an error status.
            status: the HTTP status, 400 to 599, when there is no `fault`; 429 and 503 come with
                `Retry-After: 1`.
            times: how many calls fail; None means all until the failure is removed.
            namespace: only calls in this namespace.
            kind: only calls on one artifact of this kind.
            key: only calls on the artifact with this key.

        Returns:
            A handle that counts the calls, waits for them and ends the failure.

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
        """Ends all failures; hanging calls are answered now."""
        while self._failures:
            self._failures.popleft().remove()

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call since the start, oldest first; only the last 100,000 are kept."""
        return tuple(self._calls)

    def count(
        self,
        operation: ServerCall | None = None,
        *,
        namespace: str | None = None,
        key: ArtifactKey | None = None,
    ) -> int:
        """Number of calls so far, failed ones included; each argument restricts which count."""
        return sum(
            operation in (None, call.operation)
            and namespace in (None, call.namespace)
            and key in (None, call.key)
            for call in self.calls
        )

    @property
    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """Every stored artifact, oldest first, withheld ones included."""
        return self._store.listed()

    @property
    def reports(self) -> tuple[RunReport, ...]:
        """What the processes of jobs reported when they ended, the latest last."""
        return self._store.reported()

    def clear(self) -> None:
        """Removes all artifacts, leases, manifests, reports, calls and failures; keeps serving."""
        self.recover()
        self._store.clear()
        self._calls.clear()

    def _record(self, call: Call) -> Failure | None:
        """Records a call and returns the failure that applies to it."""
        failures = tuple(self._failures)
        failure = next((each for each in failures if each.applies_to(call)), None)
        self._calls.append(replace(call, failure=failure))
        return failure
