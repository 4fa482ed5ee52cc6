"""A graphstash server for your own tests: in memory, on loopback, with failures on demand.

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

It speaks real HTTP, so the code under test may be a subprocess, and nothing has to be patched. It
needs none of graphstash's extras.
"""

import os
import re
import secrets
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ValidationError

from graphstash_schema import (
    STATUS,
    Access,
    AccessKind,
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    ErrorCode,
    Grant,
    InvalidValueError,
    LeaseOutcome,
    LeaseReply,
    LeaseRequest,
    LeaseState,
    LookupRequest,
    LookupResponse,
    Manifest,
    ManifestEntry,
    ManifestName,
    ManifestUpdate,
    Namespace,
    NamespaceStats,
    Problem,
    ReportRequest,
    ReportResponse,
    ServerStats,
    VerifyResponse,
)
from graphstash_schema.protocol import (
    ADMIN_PREFIX,
    API_PREFIX,
    HEADER_COPY,
    HEADER_HITS,
    HEADER_LEASE,
    HEADER_METADATA,
    HEADER_PROTOCOL,
    HEADER_REQUEST_ID,
    MAX_LOOKUP_KEYS,
    MAX_MANIFEST_ENTRIES,
    MAX_WAIT_SECONDS,
    PROBLEM_MEDIA_TYPE,
    PROTOCOL_VERSION,
)
from graphstash_schema.run import (
    MAX_LISTED_RUNS,
    MAX_RUN_BYTES,
    MAX_RUN_COUNTS,
    MAX_RUN_MISSES,
    Run,
    RunCounts,
    RunList,
    RunMiss,
    RunName,
    RunReport,
)

if TYPE_CHECKING:
    from graphstash import ClientConfig

__all__ = ["Call", "Failure", "FakeServer", "Fault", "ServerCall", "StoredArtifact"]

ServerCall: TypeAlias = Literal[
    "get", "head", "put", "delete", "lookup", "verify", "report", "acquire", "renew", "release",
    "get_manifest", "put_manifest", "put_run", "get_run", "list_runs",
    "stats", "access", "health", "ready",
]  # fmt: skip
"""A call of the protocol: on an artifact, on the lease to compile one, on a manifest, on what a run
reports, or on the server itself."""

Fault: TypeAlias = Literal[
    "reset", "hang", "truncate", "flip", "wrong_artifact", "stranger",
]  # fmt: skip
"""A failure other than an error status:

* `reset`: the connection is reset instead of an answer. The client repeats a call once when a
  connection that it had kept open breaks, so it may not notice `times=1`.
* `hang`: no answer until the client hangs up or the failure is removed.
* `truncate`: the connection ends in the middle of the body.
* `flip`: one bit in the middle of the body is flipped.
* `wrong_artifact`: a `get` is answered with another artifact of the namespace.
* `stranger`: another web server answers: 200 and an HTML page to everything.
"""

_Model = TypeVar("_Model", bound=BaseModel)

_MAX_CALLS: Final = 100_000
_MAX_JSON_BYTES: Final = 2 * 1024**2
_ARTIFACT_OVERHEAD_BYTES: Final = 1024
_POLL_SECONDS: Final = 0.05
"""How often a call that waits checks whether its client has hung up."""
_CLOSE_SECONDS: Final = 10.0

_CODES: Final = {
    **{status: code for code, status in reversed(STATUS.items())},
    400: ErrorCode.INVALID_REQUEST,
    404: ErrorCode.NOT_FOUND,
}
"""The error code of a status that is given to `fail_on`."""

_KEY: Final = "(?P<kind>[^/]+)/(?P<device_type>[^/]+)/(?P<fingerprint>[^/]+)"
_IN_NAMESPACE: Final = f"{API_PREFIX}/(?P<namespace>[^/]+)"
_ROUTES: Final[Mapping[str, Mapping[str, ServerCall]]] = {
    "/healthz": {"GET": "health"},
    "/readyz": {"GET": "ready"},
    f"{API_PREFIX}/stats": {"GET": "stats"},
    f"{ADMIN_PREFIX}/access": {"GET": "access"},
    f"{_IN_NAMESPACE}/artifacts/{_KEY}": {
        "GET": "get", "HEAD": "head", "PUT": "put", "DELETE": "delete",
    },
    f"{_IN_NAMESPACE}/artifacts:lookup": {"POST": "lookup"},
    f"{_IN_NAMESPACE}/artifacts:verify": {"POST": "verify"},
    f"{_IN_NAMESPACE}/artifacts:report": {"POST": "report"},
    f"{_IN_NAMESPACE}/leases/{_KEY}": {"POST": "acquire", "PUT": "renew", "DELETE": "release"},
    f"{_IN_NAMESPACE}/manifests/(?P<name>[^/]+)": {"GET": "get_manifest", "PUT": "put_manifest"},
    f"{_IN_NAMESPACE}/runs": {"GET": "list_runs"},
    f"{_IN_NAMESPACE}/runs/(?P<run>[^/]+)": {"GET": "get_run"},
    f"{_IN_NAMESPACE}/runs/(?P<run>[^/]+)/(?P<process>[^/]+)": {"PUT": "put_run"},
}  # fmt: skip

_STRANGER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"
)


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One artifact on the server.

    Attributes:
        namespace: where it is stored.
        key: under which it is stored.
        blob: the bytes that the client uploaded: its compressed envelope. `Stash.get` returns the
            payload inside.
        metadata: from its publisher; None without any.
        is_withheld: whether a client reported it as wrong, so that it is not served.
        hits: how often it was downloaded.
    """

    namespace: str
    key: ArtifactKey
    blob: bytes
    metadata: ArtifactMetadata | None = None
    is_withheld: bool = False
    hits: int = 0


@dataclass(eq=False, kw_only=True)
class Failure:
    """A failure that `FakeServer.fail_on` has set up; as a context manager it ends with its block.

    Attributes:
        operations: the calls that fail; empty means every call.
        fault: how they fail; None means that they are answered with `status`.
        status: the HTTP status of the answer; 429 and 503 ask for a pause of one second.
        times: how many calls fail before the server recovers; None for no limit.
        namespace: only calls in this namespace fail; None for any.
        kind: only calls on an artifact of this kind fail; None for any.
        key: only calls on this artifact fail; None for any.
        count: number of calls that have failed because of it.
    """

    operations: frozenset[ServerCall]
    fault: Fault | None
    status: int
    times: int | None
    namespace: str | None
    kind: str | None
    key: ArtifactKey | None
    count: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _removed: threading.Event = field(default_factory=threading.Event, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def wait(self, *, count: int = 1, timeout_seconds: float = 30.0) -> None:
        """Blocks until `count` calls have failed, so that a test need not sleep.

        Raises:
            TimeoutError: fewer calls came within `timeout_seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, timeout_seconds):
                raise TimeoutError(
                    f"{self.count} of {count} calls came within {timeout_seconds:g} s"
                )

    def remove(self) -> None:
        """Ends the failure; calls that hang because of it are answered now."""
        self._removed.set()

    def is_removed(self, *, within_seconds: float = 0.0) -> bool:
        """Whether it has ended, or ends within some seconds."""
        return self._removed.wait(within_seconds)

    def applies_to(self, call: "Call") -> bool:
        """Whether the call fails because of it; the server asks once per call, which is counted."""
        with self._changed:
            applies = (
                not self._removed.is_set()
                and (not self.operations or call.operation in self.operations)
                and self.namespace in (None, call.namespace)
                and self.key in (None, call.key)
                and self.kind in (None, call.key and call.key.kind)
                and (self.times is None or self.count < self.times)
            )
            self.count += applies
            self._changed.notify_all()
        return applies


@dataclass(frozen=True, slots=True)
class Call:
    """One request that the server received.

    Attributes:
        operation: the call of the protocol.
        namespace: the namespace of the call; None for a call on the server itself.
        key: the artifact, for a call on a single one.
        headers: of the request, names in lower case.
        failure: the failure that `fail_on` had set up for it; None when it was answered properly.
    """

    operation: ServerCall
    namespace: str | None
    key: ArtifactKey | None
    headers: Mapping[str, str]
    failure: Failure | None = None


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
        self._store = _Store(max_bytes)
        self._calls: deque[Call] = deque(maxlen=_MAX_CALLS)
        self._failures: deque[Failure] = deque()
        self._http = _HttpServer(self._store, token=token, record=self._record)
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
            self._thread = threading.Thread(target=serve, args=(_POLL_SECONDS,), daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends every connection and thread; further calls cannot connect.

        Recorded calls and stored artifacts can still be read. Closing it again does nothing.
        """
        self._store.close()
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join(_CLOSE_SECONDS)
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


_Where: TypeAlias = tuple[Namespace, ArtifactKey]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request whose path is known; what its path and body do not name is empty."""

    operation: ServerCall
    where: _Where
    words: Mapping[str, str]
    query: str
    headers: Mapping[str, str]
    body: bytes
    is_gone: Callable[[], bool]

    def parse(self, model: type[_Model]) -> _Model:
        try:
            return model.model_validate_json(self.body or b"{}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, InvalidValueError):
                raise cause from None
            where = ".".join(map(str, first["loc"])) or "body"
            raise _RefusalError(ErrorCode.INVALID_REQUEST, f"{where}: {first['msg']}") from None

    def keys(self, model: type[LookupRequest | ManifestUpdate], limit: int) -> list[ArtifactKey]:
        if (count := self.body.count(b"{") - 1) > limit:
            raise _RefusalError(ErrorCode.TOO_MANY_KEYS, f"{count} keys: at most {limit}")
        return list(dict.fromkeys(self.parse(model).keys))


@dataclass(frozen=True, slots=True)
class _Answer:
    """A status, a body or the model that it is made of, and headers."""

    status: int
    body: bytes | BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class _RefusalError(Exception):
    def __init__(self, code: ErrorCode, detail: str, **digests: Digest) -> None:
        super().__init__(detail)
        self.code = code
        self.digests = {name: str(digest) for name, digest in digests.items()}


@dataclass(slots=True)
class _Lease:
    token: str
    fencing: int
    holder: str
    expires_at: float
    is_ended: bool = False

    @property
    def is_held(self) -> bool:
        return not self.is_ended and monotonic() < self.expires_at

    def granted(self, wanted: LeaseRequest) -> LeaseReply:
        return LeaseReply(
            state=LeaseState.GRANTED,
            token=self.token,
            fencing=self.fencing,
            ttl_seconds=wanted.ttl_seconds,
        )


class _Health(BaseModel):
    status: str
    version: str | None = None
    database: str | None = None
    blob_store: str | None = None


class _Store:
    """Artifacts, leases, manifests and reports, with one method per call; one lock guards all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.is_closed = False
        self._changed = threading.Condition()
        self._started = monotonic()
        self._waiters = 0
        self.clear()

    def clear(self) -> None:
        with self._changed:
            self._artifacts: dict[_Where, StoredArtifact] = {}
            self._leases: dict[_Where, _Lease] = {}
            self._manifests: dict[tuple[Namespace, str], dict[ArtifactKey, ManifestEntry]] = {}
            self._runs: dict[tuple[Namespace, RunName], dict[RunName, RunReport]] = {}
            self._usage: defaultdict[str, Counter[str]] = defaultdict(Counter)
            self._grants = self._reports = 0
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def listed(self) -> tuple[StoredArtifact, ...]:
        with self._changed:
            return tuple(self._artifacts.values())

    def reported(self) -> tuple[RunReport, ...]:
        with self._changed:
            return tuple(report for reports in self._runs.values() for report in reports.values())

    def answer(self, request: _Request) -> _Answer:
        with self._changed:
            handler: Callable[[_Request], _Answer] = getattr(self, f"_{request.operation}")
            return handler(request)

    def instead_of(self, where: _Where) -> _Where:
        """Another artifact of the namespace."""
        for namespace, key in tuple(self._artifacts):
            if namespace == where[0] and key != where[1]:
                return namespace, key
        raise _RefusalError(ErrorCode.INTERNAL, "wrong_artifact needs a second artifact")

    def _health(self, _: _Request) -> _Answer:
        return _Answer(200, _Health(status="ok", version=_version()))

    def _ready(self, _: _Request) -> _Answer:
        return _Answer(200, _Health(status="ready", database="ok", blob_store="ok"))

    def _access(self, request: _Request) -> _Answer:
        kind = AccessKind.TOKEN if "authorization" in request.headers else AccessKind.OPEN
        return _Answer(200, Access(kind=kind, name="a test", grants=(Grant.parse("admin:*"),)))

    def _stats(self, _: _Request) -> _Answer:
        for namespace, _key in self._artifacts:
            self._usage[namespace].update(())  # listed although nobody has used it
        stats = ServerStats(
            version=_version(),
            uptime_seconds=monotonic() - self._started,
            leases_held=sum(lease.is_held for lease in self._leases.values()),
            waiters=self._waiters,
            healed=0,
            reported=self._reports,
            namespaces=tuple(map(self._stats_of, sorted(self._usage))),
        )
        return _Answer(200, stats)

    def _stats_of(self, namespace: str) -> NamespaceStats:
        usage = self._usage[namespace]
        stored = [each for each in self._artifacts.values() if each.namespace == namespace]
        return NamespaceStats(
            namespace=namespace,
            artifacts=len(stored),
            size_bytes=sum(len(artifact.blob) for artifact in stored),
            hits=usage["hits"],
            misses=usage["misses"],
            served_bytes=usage["served_bytes"],
            puts=usage["puts"],
            conflicts=usage["conflicts"],
            saved_seconds=usage["saved_milliseconds"] / 1000,
            withheld=sum(artifact.is_withheld for artifact in stored),
        )

    def _find(self, where: _Where) -> StoredArtifact | None:
        artifact = self._artifacts.get(where)
        return None if artifact is None or artifact.is_withheld else artifact

    def _get(self, request: _Request) -> _Answer:
        usage, artifact = self._usage[request.where[0]], self._find(request.where)
        is_use = request.headers.get(HEADER_COPY.lower()) != "1"
        if artifact is None:
            usage["misses"] += is_use
            raise _not_found(request)
        if not is_use:
            usage["served_bytes"] += len(artifact.blob)
            return _Answer(200, artifact.blob, _headers_of(artifact))
        self._artifacts[request.where] = replace(artifact, hits=artifact.hits + 1)
        milliseconds = 1000 * artifact.metadata.compile_seconds if artifact.metadata else 0
        usage.update(
            hits=1, served_bytes=len(artifact.blob), saved_milliseconds=round(milliseconds)
        )
        return _Answer(200, artifact.blob, _headers_of(artifact))

    def _head(self, request: _Request) -> _Answer:
        artifact = self._find(request.where)
        if artifact is None:
            raise _not_found(request)
        headers = {**_headers_of(artifact), HEADER_HITS: str(artifact.hits)}
        return _Answer(200, artifact.blob, headers)

    def _put(self, request: _Request) -> _Answer:
        namespace, key = request.where
        digest = _announced(request)
        header = request.headers.get(HEADER_METADATA.lower())
        metadata = ArtifactMetadata.from_header(header) if header else None
        stored = self._artifacts.get(request.where)
        if stored is not None:
            self._refuse_other(stored, digest, request)
        else:
            used = sum(len(one.blob) + _ARTIFACT_OVERHEAD_BYTES for one in self._artifacts.values())
            if used + len(request.body) + _ARTIFACT_OVERHEAD_BYTES > self.max_bytes:
                raise _RefusalError(
                    ErrorCode.INSUFFICIENT_STORAGE, f"FakeServer(max_bytes={self.max_bytes})"
                )
            self._artifacts[request.where] = StoredArtifact(namespace, key, request.body, metadata)
            self._usage[namespace]["puts"] += 1
            if lease := self._leases.get(request.where):
                lease.is_ended = True
            self._changed.notify_all()
        headers = {"ETag": digest.etag, "Repr-Digest": digest.repr_digest}
        headers["Location"] = key.artifact_path(namespace)
        return _Answer(200 if stored else 201, None, headers)

    def _refuse_other(self, stored: StoredArtifact, digest: Digest, request: _Request) -> None:
        """Refuses an upload unless the very same bytes are stored already."""
        kept = Digest.of(stored.blob)
        refuse = {
            ErrorCode.WITHHELD: stored.is_withheld,
            ErrorCode.PRECONDITION_FAILED: request.headers.get("if-none-match", "").strip() == "*",
            ErrorCode.CONFLICT: kept != digest,
        }
        for code, applies in refuse.items():
            if applies:
                self._usage[stored.namespace]["conflicts"] += code is ErrorCode.CONFLICT
                detail = f"{stored.key} is stored already, with the digest {kept}"
                raise _RefusalError(code, detail, digest=kept, given_digest=digest)

    def _delete(self, request: _Request) -> _Answer:
        if self._artifacts.pop(request.where, None) is None:
            raise _not_found(request)
        return _Answer(204)

    def _lookup(self, request: _Request) -> _Answer:
        keys = request.keys(LookupRequest, MAX_LOOKUP_KEYS)
        artifacts = {key: self._find((request.where[0], key)) for key in keys}
        found = tuple(
            ArtifactInfo(
                key=key,
                digest=str(Digest.of(artifact.blob)),
                size_bytes=len(artifact.blob),
                compile_seconds=artifact.metadata.compile_seconds if artifact.metadata else 0.0,
            )
            for key, artifact in artifacts.items()
            if artifact
        )
        missing = tuple(key for key, artifact in artifacts.items() if not artifact)
        return _Answer(200, LookupResponse(found=found, missing=missing))

    def _verify(self, request: _Request) -> _Answer:
        is_found = self._find(request.where) is not None
        return _Answer(200, VerifyResponse(found=is_found, healed=False))

    def _report(self, request: _Request) -> _Answer:
        report = request.parse(ReportRequest)
        artifact = self._artifacts.get(request.where)
        if artifact is None or str(Digest.of(artifact.blob)) != report.digest:
            return _Answer(200, ReportResponse(found=False, withheld=False))
        self._reports += 1
        is_withheld = artifact.is_withheld or report.reason.is_about_artifact
        self._artifacts[request.where] = replace(artifact, is_withheld=is_withheld)
        return _Answer(200, ReportResponse(found=True, withheld=is_withheld))

    def _acquire(self, request: _Request) -> _Answer:
        wanted = request.parse(LeaseRequest)
        prefer = re.search(r"wait=(\d{1,9})", request.headers.get("prefer", ""))
        wait_seconds = min(float(prefer[1]), MAX_WAIT_SECONDS) if prefer else 0.0
        deadline = monotonic() + wait_seconds
        headers = {"Preference-Applied": f"wait={wait_seconds:.0f}"} if prefer else {}
        while True:
            if (artifact := self._find(request.where)) is not None:
                digest, size = str(Digest.of(artifact.blob)), len(artifact.blob)
                ready = LeaseReply(state=LeaseState.READY, digest=digest, size_bytes=size)
                return _Answer(200, ready, headers)
            lease = self._leases.get(request.where)
            if lease is None or not lease.is_held:
                if request.is_gone():  # it waited, and would keep others from the lease now
                    return _Answer(204)
                return _Answer(201, self._grant(request.where, wanted), headers)
            left = deadline - monotonic()
            if left <= 0 or self.is_closed or request.is_gone():
                expires_in = max(lease.expires_at - monotonic(), 0.0)
                held = LeaseReply(
                    state=LeaseState.HELD, holder=lease.holder, expires_in_seconds=expires_in
                )
                return _Answer(202, held, {**headers, "Retry-After": "1"})
            self._waiters += 1
            self._changed.wait(min(left, _POLL_SECONDS))
            self._waiters -= 1

    def _grant(self, where: _Where, wanted: LeaseRequest) -> LeaseReply:
        self._grants += 1
        expires_at = monotonic() + wanted.ttl_seconds
        lease = _Lease(secrets.token_hex(16), self._grants, wanted.holder, expires_at)
        self._leases[where] = lease
        return lease.granted(wanted)

    def _renew(self, request: _Request) -> _Answer:
        wanted = request.parse(LeaseRequest)
        lease = self._lease_of(request)
        if lease.is_ended:
            raise _lost(request)
        lease.expires_at = monotonic() + wanted.ttl_seconds
        lease.holder = wanted.holder
        return _Answer(200, lease.granted(wanted))

    def _release(self, request: _Request) -> _Answer:
        if parse_qs(request.query).get("outcome", [""])[0] not in set(LeaseOutcome):
            raise _RefusalError(
                ErrorCode.INVALID_REQUEST, f"query.outcome: expected {', '.join(LeaseOutcome)}"
            )
        self._lease_of(request).is_ended = True
        self._changed.notify_all()
        return _Answer(204)

    def _lease_of(self, request: _Request) -> _Lease:
        """The lease that the request's token holds, or has ended already."""
        token = request.headers.get(HEADER_LEASE.lower())
        if token is None:
            raise _RefusalError(ErrorCode.INVALID_REQUEST, f"{HEADER_LEASE} is missing")
        lease = self._leases.get(request.where)
        if lease is None or lease.token != token or not (lease.is_ended or lease.is_held):
            raise _lost(request)
        return lease

    def _get_manifest(self, request: _Request) -> _Answer:
        name = ManifestName(request.words["name"])
        entries = self._manifests.get((request.where[0], name))
        if entries is None:
            raise _RefusalError(ErrorCode.NOT_FOUND, f"there is no manifest {name}")
        newest_first = sorted(
            entries.values(), key=lambda entry: (-entry.used_at.timestamp(), str(entry.key))
        )
        return _Answer(200, Manifest(name=name, entries=tuple(newest_first)))

    def _put_manifest(self, request: _Request) -> _Answer:
        where = (request.where[0], ManifestName(request.words["name"]))
        keys = request.keys(ManifestUpdate, MAX_MANIFEST_ENTRIES)
        is_new = where not in self._manifests
        entries = self._manifests.setdefault(where, {})
        now = datetime.now(UTC)
        for key in keys:
            before = entries.pop(key, None)  # the latest used goes to the end
            runs = before.runs + 1 if before else 1
            entries[key] = ManifestEntry(key=key, used_at=now, runs=runs)
        while len(entries) > MAX_MANIFEST_ENTRIES:
            del entries[next(iter(entries))]
        return replace(self._get_manifest(request), status=201 if is_new else 200)

    def _put_run(self, request: _Request) -> _Answer:
        namespace = request.where[0]
        run, process = RunName(request.words["run"]), RunName(request.words["process"])
        if len(request.body) > MAX_RUN_BYTES:
            raise _RefusalError(
                ErrorCode.TOO_LARGE, f"the report has more than {MAX_RUN_BYTES} bytes"
            )
        report = request.parse(RunReport)
        if not self._usage[namespace]["puts"]:
            raise _RefusalError(
                ErrorCode.NOT_FOUND, f"nothing was ever stored in the namespace {namespace}"
            )
        reports = self._runs.pop((namespace, run), {})  # the latest goes to the end
        self._runs[namespace, run] = {**reports, process: report}
        return _Answer(204)

    def _get_run(self, request: _Request) -> _Answer:
        namespace, run = request.where[0], RunName(request.words["run"])
        reports = self._runs.get((namespace, run))
        if reports is None:
            raise _RefusalError(ErrorCode.NOT_FOUND, f"there is no report of a run {run}")
        return _with_nulls(_sum_of(run, reports))

    def _list_runs(self, request: _Request) -> _Answer:
        asked = {name: values[0] for name, values in parse_qs(request.query).items()}
        job = ManifestName(asked["job"]) if "job" in asked else None
        limit = asked.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED_RUNS:
            raise _RefusalError(
                ErrorCode.INVALID_REQUEST, f"query.limit: expected 1 to {MAX_LISTED_RUNS}"
            )
        runs = [
            _sum_of(run, reports).model_copy(update={"misses": ()})
            for (namespace, run), reports in reversed(self._runs.items())
            if namespace == request.where[0]
            and (job is None or any(each.job == job for each in reports.values()))
        ]
        return _with_nulls(RunList(runs=tuple(runs[: int(limit)])))


class _HttpServer(ThreadingHTTPServer):
    """Keeps its threads, so that `close` can wait for them."""

    request_queue_size = 128

    def __init__(
        self, store: _Store, *, token: str | None, record: Callable[[Call], Failure | None]
    ) -> None:
        self.store = store
        self.token = token
        self.record = record
        self._serving: list[tuple[socket.socket, threading.Thread]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        self._serving = [each for each in self._serving if each[1].is_alive()]
        self._serving.append((request, thread))
        thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: clients hang up in tests, and the log of calls tells the rest."""

    def close(self) -> None:
        with suppress(OSError):
            # A process that was forked meanwhile holds the listener as well.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for connection, thread in self._serving:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_CLOSE_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    """One connection: reads requests, and answers them or lets them fail."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def log_message(self, *_: Any) -> None:
        """Prints nothing: a test reads `FakeServer.calls`."""

    def do_GET(self) -> None:
        fault: Fault | None = None
        try:
            request = self._read()
            namespace, key = request.where
            call = Call(request.operation, namespace or None, key, request.headers)
            failure = self.server.record(call)
            if failure is not None:
                fault = failure.fault
                if fault is None:
                    self._send(_failed(failure))
                    return
                if self._ends_without_answer(failure):
                    return
            self._check(request)
            if fault == "wrong_artifact" and request.operation == "get":
                request = replace(request, where=self.server.store.instead_of(request.where))
            answer = self.server.store.answer(request)
        except (_RefusalError, InvalidValueError) as refusal:
            answer = _problem(refusal)
        self._send(answer, fault=fault)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815 - as the library calls them

    def _read(self) -> _Request:
        """The request, body included, so that the connection can serve the next one."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body(headers)
        target = urlsplit(self.path)
        operation, words = _route(self.command, target.path)
        key: Any = None
        if "fingerprint" in words:
            key = ArtifactKey.parse(words["kind"], words["device_type"], words["fingerprint"])
        namespace = Namespace(words["namespace"]) if "namespace" in words else ""
        request = _Request(
            operation,
            (namespace, key),  # type: ignore[arg-type] # both, where the call is on an artifact
            words,
            target.query,
            headers,
            body,
            self._is_gone,
        )
        if operation == "verify":
            key = request.parse(ArtifactKey)
        if operation == "report":
            key = request.parse(ReportRequest).key
        return replace(request, where=(request.where[0], key))

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        is_upload = self.command == "PUT" and "/artifacts/" in self.path
        length = headers.get("content-length", "" if is_upload else "0")
        limit = self.server.store.max_bytes if is_upload else _MAX_JSON_BYTES
        body = b""
        if "transfer-encoding" in headers or not length.isdecimal():
            refusal = _RefusalError(ErrorCode.LENGTH_REQUIRED, "Content-Length is missing")
        elif int(length) > limit:
            refusal = _RefusalError(ErrorCode.TOO_LARGE, f"the body has more than {limit} bytes")
        elif len(body := self.rfile.read(int(length))) == int(length):
            return body
        else:
            refusal = _RefusalError(ErrorCode.LENGTH_MISMATCH, "the connection ended in the body")
        self.close_connection = True
        raise refusal

    def _check(self, request: _Request) -> None:
        """Refuses another protocol version, and clients without the token."""
        version = request.headers.get(HEADER_PROTOCOL.lower(), str(PROTOCOL_VERSION))
        if version != str(PROTOCOL_VERSION):
            raise _RefusalError(
                ErrorCode.UNSUPPORTED_PROTOCOL, f"protocol version {version!r} is not supported"
            )
        token = self.server.token
        is_open = token is None or request.operation in {"health", "ready"}
        if not is_open and request.headers.get("authorization") != f"Bearer {token}":
            raise _RefusalError(
                ErrorCode.UNAUTHENTICATED, "authentication required: set GRAPHSTASH_TOKEN"
            )

    def _ends_without_answer(self, failure: Failure) -> bool:
        """Lets a call hang, or ends its connection; whether it needs no answer any more."""
        if failure.fault == "hang":
            while not failure.is_removed(within_seconds=_POLL_SECONDS):
                if self._has_ended():
                    return True
        elif failure.fault == "reset":
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())  # `close` would wait for the files made of it
        elif failure.fault == "stranger":
            self.close_connection = True
            self.wfile.write(_STRANGER)
        return failure.fault in {"reset", "stranger"}

    def _send(self, answer: _Answer, *, fault: Fault | None = None) -> None:
        body, headers = answer.body or b"", dict(answer.headers)
        if isinstance(body, BaseModel):
            is_problem = isinstance(body, Problem)
            headers["Content-Type"] = PROBLEM_MEDIA_TYPE if is_problem else "application/json"
            body = body.model_dump_json(exclude_none=True).encode()
        headers |= {HEADER_PROTOCOL: str(PROTOCOL_VERSION), HEADER_REQUEST_ID: "fake"}
        if answer.status != 204:
            headers["Content-Length"] = str(len(body))
        if self.command == "HEAD":
            body = b""
        if fault == "flip" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :]
        if fault == "truncate" and body:
            self.close_connection = True
            body = body[: len(body) // 2]
        if self.close_connection:
            headers["Connection"] = "close"
        lines = [f"HTTP/1.1 {answer.status} {responses.get(answer.status, 'Failed')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def _has_ended(self) -> bool:
        self.close_connection |= self.server.store.is_closed or self._is_gone()
        return self.close_connection

    def _is_gone(self) -> bool:
        try:
            seen: bytes = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return seen == b""


def _route(method: str, path: str) -> tuple[ServerCall, dict[str, str]]:
    for pattern, operations in _ROUTES.items():
        if match := re.fullmatch(pattern, path):
            if method not in operations:
                allowed = ", ".join(operations)
                raise _RefusalError(ErrorCode.METHOD_NOT_ALLOWED, f"{path}: use {allowed}")
            return operations[method], match.groupdict()
    raise _RefusalError(ErrorCode.UNKNOWN_PATH, f"unknown path {path}")


def _announced(request: _Request) -> Digest:
    """The digest of an upload, which its bytes have."""
    text = request.headers.get("repr-digest")
    if text is None:
        raise _RefusalError(ErrorCode.DIGEST_REQUIRED, "Repr-Digest is missing (RFC 9530)")
    given = Digest.parse_repr_digest(text, size_bytes=len(request.body))
    found = Digest.of(request.body)
    if found != given:
        code, detail = ErrorCode.DIGEST_MISMATCH, f"the body does not have the digest {given}"
        raise _RefusalError(code, detail, digest=found, given_digest=given)
    return found


def _headers_of(artifact: StoredArtifact) -> dict[str, str]:
    digest = Digest.of(artifact.blob)
    headers = {"ETag": digest.etag, "Repr-Digest": digest.repr_digest}
    if artifact.metadata is not None:
        headers[HEADER_METADATA] = artifact.metadata.to_header()
    return headers | {"Content-Type": "application/octet-stream"}


def _not_found(request: _Request) -> _RefusalError:
    namespace, key = request.where
    return _RefusalError(ErrorCode.NOT_FOUND, f"there is no artifact {key} in {namespace!r}")


def _with_nulls(model: BaseModel) -> _Answer:
    """An answer that names fields without a value, too."""
    headers = {"Content-Type": "application/json"}
    return _Answer(200, model.model_dump_json().encode(), headers)


def _sum_of(run: RunName, reports: Mapping[RunName, RunReport]) -> Run:
    """What the processes of a run reported, as one."""
    _, first = min(reports.items(), key=lambda each: (each[1].started_at, each[0]))
    every = tuple(reports.values())
    sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for counts in (counts for each in every for counts in each.counts):
        sums[counts.kind, counts.device_type].update(
            counts.model_dump(exclude={"kind", "device_type"})
        )
    longest: dict[ArtifactKey, RunMiss] = {}
    for miss in sorted((miss for each in every for miss in each.misses), key=_seconds):
        longest[miss.key] = miss
    return Run(
        run=run,
        job=first.job,
        program=first.program,
        producer=first.producer,
        started_at=first.started_at,
        seconds=max(each.seconds for each in every),
        processes=len(every),
        saved_wall_seconds=max(each.saved_wall_seconds for each in every),
        counts=tuple(
            RunCounts.model_validate({"kind": kind, "device_type": device_type, **counts})
            for (kind, device_type), counts in sums.items()
        )[:MAX_RUN_COUNTS],
        misses=tuple(sorted(longest.values(), key=_seconds, reverse=True))[:MAX_RUN_MISSES],
    )


def _seconds(miss: RunMiss) -> float:
    return miss.seconds


def _lost(request: _Request) -> _RefusalError:
    key = request.where[1]
    return _RefusalError(ErrorCode.LEASE_LOST, f"this token does not hold the lease on {key}")


def _problem(error: _RefusalError | InvalidValueError) -> _Answer:
    problem = Problem.of(error.code, str(error), request_id="fake")
    if isinstance(error, _RefusalError):
        problem = problem.model_copy(update=error.digests)
    is_unauthenticated = error.code is ErrorCode.UNAUTHENTICATED
    headers = {"WWW-Authenticate": 'Bearer realm="graphstash"'} if is_unauthenticated else {}
    return _Answer(problem.status, problem, headers)


def _failed(failure: Failure) -> _Answer:
    """An error status: a problem document, or nothing where only a proxy would answer so."""
    code = _CODES.get(failure.status)
    answer = _Answer(failure.status)
    if code is not None:
        answer = _problem(_RefusalError(code, "FakeServer.fail_on"))
    is_busy = failure.status in (429, 503)
    return replace(answer, headers={**answer.headers, "Retry-After": "1"}) if is_busy else answer


def _version() -> str:
    from graphstash import __version__

    return str(__version__)
