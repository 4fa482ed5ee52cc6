"""In-memory state and rules of the server, with one method for each call."""

import re
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Final
from urllib.parse import parse_qs

from pydantic import BaseModel

from graphstash.testing.exchange import Answer, RefusalError, Request, Where
from graphstash.testing.runs import sum_of
from graphstash_schema import (
    Access,
    AccessKind,
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    ErrorCode,
    Grant,
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
    ReportRequest,
    ReportResponse,
    ServerStats,
    VerifyResponse,
)
from graphstash_schema.protocol import (
    HEADER_COPY,
    HEADER_HITS,
    HEADER_LEASE,
    HEADER_METADATA,
    MAX_LOOKUP_KEYS,
    MAX_MANIFEST_ENTRIES,
    MAX_WAIT_SECONDS,
)
from graphstash_schema.run import MAX_LISTED_RUNS, MAX_RUN_BYTES, RunList, RunName, RunReport

__all__ = ["POLL_SECONDS", "Store", "StoredArtifact"]

_ARTIFACT_OVERHEAD_BYTES: Final = 1024

POLL_SECONDS: Final = 0.05
"""Seconds between checks of whether a waiting client has disconnected."""


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One artifact on the server.

    Attributes:
        namespace: namespace of the artifact.
        key: key of the artifact.
        blob: uploaded bytes: the compressed envelope. `Stash.get` returns the payload inside.
        metadata: metadata from the publisher, if any.
        is_withheld: whether a client reported the artifact as wrong, so that it is not served.
        hits: number of downloads.
    """

    namespace: str
    key: ArtifactKey
    blob: bytes
    metadata: ArtifactMetadata | None = None
    is_withheld: bool = False
    hits: int = 0


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


class Store:
    """Artifacts, leases, manifests and reports, guarded by one lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.is_closed = False
        self._changed = threading.Condition()
        self._started = monotonic()
        self._waiters = 0
        self.clear()

    def clear(self) -> None:
        """Remove all state."""
        with self._changed:
            self._artifacts: dict[Where, StoredArtifact] = {}
            self._leases: dict[Where, _Lease] = {}
            self._manifests: dict[tuple[Namespace, str], dict[ArtifactKey, ManifestEntry]] = {}
            self._runs: dict[tuple[Namespace, RunName], dict[RunName, RunReport]] = {}
            self._usage: defaultdict[str, Counter[str]] = defaultdict(Counter)
            self._grants = self._reports = 0
            self._changed.notify_all()

    def close(self) -> None:
        """Wake up all waiting calls, and let no further call wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def listed(self) -> tuple[StoredArtifact, ...]:
        """Return every artifact, oldest first."""
        with self._changed:
            return tuple(self._artifacts.values())

    def reported(self) -> tuple[RunReport, ...]:
        """Return the reports of processes, oldest first."""
        with self._changed:
            return tuple(report for reports in self._runs.values() for report in reports.values())

    def answer(self, request: Request) -> Answer:
        """Execute a request and return its response."""
        with self._changed:
            handler: Callable[[Request], Answer] = getattr(self, f"_{request.operation}")
            return handler(request)

    def instead_of(self, where: Where) -> Where:
        """Return the key of another artifact in the namespace."""
        for namespace, key in tuple(self._artifacts):
            if namespace == where[0] and key != where[1]:
                return namespace, key
        raise RefusalError(ErrorCode.INTERNAL, "wrong_artifact needs a second artifact")

    def _health(self, _: Request) -> Answer:
        return Answer(200, _Health(status="ok", version=_version()))

    def _ready(self, _: Request) -> Answer:
        return Answer(200, _Health(status="ready", database="ok", blob_store="ok"))

    def _access(self, request: Request) -> Answer:
        kind = AccessKind.TOKEN if "authorization" in request.headers else AccessKind.OPEN
        return Answer(200, Access(kind=kind, name="a test", grants=(Grant.parse("admin:*"),)))

    def _stats(self, _: Request) -> Answer:
        for namespace, _key in self._artifacts:
            self._usage[namespace].update(())  # list the namespace even if it has no use yet
        stats = ServerStats(
            version=_version(),
            uptime_seconds=monotonic() - self._started,
            leases_held=sum(lease.is_held for lease in self._leases.values()),
            waiters=self._waiters,
            healed=0,
            reported=self._reports,
            namespaces=tuple(map(self._stats_of, sorted(self._usage))),
        )
        return Answer(200, stats)

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

    def _find(self, where: Where) -> StoredArtifact | None:
        artifact = self._artifacts.get(where)
        return None if artifact is None or artifact.is_withheld else artifact

    def _get(self, request: Request) -> Answer:
        usage, artifact = self._usage[request.where[0]], self._find(request.where)
        is_use = request.headers.get(HEADER_COPY.lower()) != "1"
        if artifact is None:
            usage["misses"] += is_use
            raise _not_found(request)
        if not is_use:
            usage["served_bytes"] += len(artifact.blob)
            return Answer(200, artifact.blob, _headers_of(artifact))
        self._artifacts[request.where] = replace(artifact, hits=artifact.hits + 1)
        milliseconds = 1000 * artifact.metadata.compile_seconds if artifact.metadata else 0
        usage.update(
            hits=1, served_bytes=len(artifact.blob), saved_milliseconds=round(milliseconds)
        )
        return Answer(200, artifact.blob, _headers_of(artifact))

    def _head(self, request: Request) -> Answer:
        artifact = self._find(request.where)
        if artifact is None:
            raise _not_found(request)
        headers = {**_headers_of(artifact), HEADER_HITS: str(artifact.hits)}
        return Answer(200, artifact.blob, headers)

    def _put(self, request: Request) -> Answer:
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
                raise RefusalError(
                    ErrorCode.INSUFFICIENT_STORAGE, f"FakeServer(max_bytes={self.max_bytes})"
                )
            self._artifacts[request.where] = StoredArtifact(namespace, key, request.body, metadata)
            self._usage[namespace]["puts"] += 1
            if lease := self._leases.get(request.where):
                lease.is_ended = True
            self._changed.notify_all()
        headers = {"ETag": digest.etag, "Repr-Digest": digest.repr_digest}
        headers["Location"] = key.artifact_path(namespace)
        return Answer(200 if stored else 201, None, headers)

    def _refuse_other(self, stored: StoredArtifact, digest: Digest, request: Request) -> None:
        """Refuse an upload unless the same bytes are stored already."""
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
                raise RefusalError(code, detail, digest=kept, given_digest=digest)

    def _delete(self, request: Request) -> Answer:
        if self._artifacts.pop(request.where, None) is None:
            raise _not_found(request)
        return Answer(204)

    def _lookup(self, request: Request) -> Answer:
        keys = request.keys(LookupRequest, MAX_LOOKUP_KEYS)
        stored = {
            key: artifact
            for key in keys
            if (artifact := self._artifacts.get((request.where[0], key))) is not None
        }
        served = {key for key, artifact in stored.items() if not artifact.is_withheld}
        return Answer(
            200,
            LookupResponse(
                found=tuple(_info(key, stored[key]) for key in stored if key in served),
                missing=tuple(key for key in keys if key not in served),
                withdrawn=tuple(_info(key, stored[key]) for key in stored if key not in served),
            ),
        )

    def _verify(self, request: Request) -> Answer:
        is_found = self._find(request.where) is not None
        return Answer(200, VerifyResponse(found=is_found, healed=False))

    def _report(self, request: Request) -> Answer:
        report = request.parse(ReportRequest)
        artifact = self._artifacts.get(request.where)
        if artifact is None or str(Digest.of(artifact.blob)) != report.digest:
            return Answer(200, ReportResponse(found=False, withheld=False))
        self._reports += 1
        is_withheld = artifact.is_withheld or report.reason.is_about_artifact
        self._artifacts[request.where] = replace(artifact, is_withheld=is_withheld)
        return Answer(200, ReportResponse(found=True, withheld=is_withheld))

    def _acquire(self, request: Request) -> Answer:
        wanted = request.parse(LeaseRequest)
        prefer = re.search(r"wait=(\d{1,9})", request.headers.get("prefer", ""))
        wait_seconds = min(float(prefer[1]), MAX_WAIT_SECONDS) if prefer else 0.0
        deadline = monotonic() + wait_seconds
        headers = {"Preference-Applied": f"wait={wait_seconds:.0f}"} if prefer else {}
        while True:
            if (artifact := self._find(request.where)) is not None:
                digest, size = str(Digest.of(artifact.blob)), len(artifact.blob)
                ready = LeaseReply(state=LeaseState.READY, digest=digest, size_bytes=size)
                return Answer(200, ready, headers)
            lease = self._leases.get(request.where)
            if lease is None or not lease.is_held:
                if request.is_gone():  # a client that is gone would keep others from the lease
                    return Answer(204)
                return Answer(201, self._grant(request.where, wanted), headers)
            left = deadline - monotonic()
            if left <= 0 or self.is_closed or request.is_gone():
                expires_in = max(lease.expires_at - monotonic(), 0.0)
                held = LeaseReply(
                    state=LeaseState.HELD, holder=lease.holder, expires_in_seconds=expires_in
                )
                return Answer(202, held, {**headers, "Retry-After": "1"})
            self._waiters += 1
            self._changed.wait(min(left, POLL_SECONDS))
            self._waiters -= 1

    def _grant(self, where: Where, wanted: LeaseRequest) -> LeaseReply:
        self._grants += 1
        expires_at = monotonic() + wanted.ttl_seconds
        lease = _Lease(secrets.token_hex(16), self._grants, wanted.holder, expires_at)
        self._leases[where] = lease
        return lease.granted(wanted)

    def _renew(self, request: Request) -> Answer:
        wanted = request.parse(LeaseRequest)
        lease = self._lease_of(request)
        if lease.is_ended:
            raise _lost(request)
        lease.expires_at = monotonic() + wanted.ttl_seconds
        lease.holder = wanted.holder
        return Answer(200, lease.granted(wanted))

    def _release(self, request: Request) -> Answer:
        if parse_qs(request.query).get("outcome", [""])[0] not in set(LeaseOutcome):
            raise RefusalError(
                ErrorCode.INVALID_REQUEST, f"query.outcome: expected {', '.join(LeaseOutcome)}"
            )
        self._lease_of(request).is_ended = True
        self._changed.notify_all()
        return Answer(204)

    def _lease_of(self, request: Request) -> _Lease:
        """Return the lease that the request's token holds or has ended."""
        token = request.headers.get(HEADER_LEASE.lower())
        if token is None:
            raise RefusalError(ErrorCode.INVALID_REQUEST, f"{HEADER_LEASE} is missing")
        lease = self._leases.get(request.where)
        if lease is None or lease.token != token or not (lease.is_ended or lease.is_held):
            raise _lost(request)
        return lease

    def _get_manifest(self, request: Request) -> Answer:
        name = ManifestName(request.words["name"])
        entries = self._manifests.get((request.where[0], name))
        if entries is None:
            raise RefusalError(ErrorCode.NOT_FOUND, f"there is no manifest {name}")
        newest_first = sorted(
            entries.values(), key=lambda entry: (-entry.used_at.timestamp(), str(entry.key))
        )
        return Answer(200, Manifest(name=name, entries=tuple(newest_first)))

    def _put_manifest(self, request: Request) -> Answer:
        where = (request.where[0], ManifestName(request.words["name"]))
        keys = request.keys(ManifestUpdate, MAX_MANIFEST_ENTRIES)
        is_new = where not in self._manifests
        entries = self._manifests.setdefault(where, {})
        now = datetime.now(UTC)
        for key in keys:
            before = entries.pop(key, None)  # move to the end as the latest used
            runs = before.runs + 1 if before else 1
            entries[key] = ManifestEntry(key=key, used_at=now, runs=runs)
        while len(entries) > MAX_MANIFEST_ENTRIES:
            del entries[next(iter(entries))]
        return replace(self._get_manifest(request), status=201 if is_new else 200)

    def _put_run(self, request: Request) -> Answer:
        namespace = request.where[0]
        run, process = RunName(request.words["run"]), RunName(request.words["process"])
        if len(request.body) > MAX_RUN_BYTES:
            raise RefusalError(
                ErrorCode.TOO_LARGE, f"the report has more than {MAX_RUN_BYTES} bytes"
            )
        report = request.parse(RunReport)
        if not self._usage[namespace]["puts"]:
            raise RefusalError(
                ErrorCode.NOT_FOUND, f"nothing was ever stored in the namespace {namespace}"
            )
        reports = self._runs.pop((namespace, run), {})  # move to the end as the latest
        self._runs[namespace, run] = {**reports, process: report}
        return Answer(204)

    def _get_run(self, request: Request) -> Answer:
        namespace, run = request.where[0], RunName(request.words["run"])
        reports = self._runs.get((namespace, run))
        if reports is None:
            raise RefusalError(ErrorCode.NOT_FOUND, f"there is no report of a run {run}")
        return _with_nulls(sum_of(run, reports))

    def _list_runs(self, request: Request) -> Answer:
        asked = {name: values[0] for name, values in parse_qs(request.query).items()}
        job = ManifestName(asked["job"]) if "job" in asked else None
        limit = asked.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED_RUNS:
            raise RefusalError(
                ErrorCode.INVALID_REQUEST, f"query.limit: expected 1 to {MAX_LISTED_RUNS}"
            )
        runs = [
            sum_of(run, reports).model_copy(update={"misses": ()})
            for (namespace, run), reports in reversed(self._runs.items())
            if namespace == request.where[0]
            and (job is None or any(each.job == job for each in reports.values()))
        ]
        return _with_nulls(RunList(runs=tuple(runs[: int(limit)])))


def _info(key: ArtifactKey, artifact: StoredArtifact) -> ArtifactInfo:
    return ArtifactInfo(
        key=key,
        digest=str(Digest.of(artifact.blob)),
        size_bytes=len(artifact.blob),
        compile_seconds=artifact.metadata.compile_seconds if artifact.metadata else 0.0,
    )


def _announced(request: Request) -> Digest:
    """Return the announced digest of an upload, after checking the body against it."""
    text = request.headers.get("repr-digest")
    if text is None:
        raise RefusalError(ErrorCode.DIGEST_REQUIRED, "Repr-Digest is missing (RFC 9530)")
    given = Digest.parse_repr_digest(text, size_bytes=len(request.body))
    found = Digest.of(request.body)
    if found != given:
        code, detail = ErrorCode.DIGEST_MISMATCH, f"the body does not have the digest {given}"
        raise RefusalError(code, detail, digest=found, given_digest=given)
    return found


def _headers_of(artifact: StoredArtifact) -> dict[str, str]:
    digest = Digest.of(artifact.blob)
    headers = {"ETag": digest.etag, "Repr-Digest": digest.repr_digest}
    if artifact.metadata is not None:
        headers[HEADER_METADATA] = artifact.metadata.to_header()
    return headers | {"Content-Type": "application/octet-stream"}


def _not_found(request: Request) -> RefusalError:
    namespace, key = request.where
    return RefusalError(ErrorCode.NOT_FOUND, f"there is no artifact {key} in {namespace!r}")


def _with_nulls(model: BaseModel) -> Answer:
    headers = {"Content-Type": "application/json"}
    return Answer(200, model.model_dump_json().encode(), headers)


def _lost(request: Request) -> RefusalError:
    key = request.where[1]
    return RefusalError(ErrorCode.LEASE_LOST, f"this token does not hold the lease on {key}")


def _version() -> str:
    from graphstash import __version__

    return str(__version__)
