"""ServerClient: the calls of one server.

It stores and interprets nothing: blobs are files that are checked against the digest that the
server announced. `_artifacts` knows what is inside them. Records of the wire are named by `schema`,
which imports each when it is used: most jobs need few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final, TypeVar

import graphstash_schema as schema
from graphstash._http.download import Downloaded, download
from graphstash._http.errors import problem_of
from graphstash._http.transport import Answer, Transport
from graphstash._trust.provenance import BoundedReader
from graphstash.config import ClientConfig, holder_name
from graphstash.errors import (
    ConflictError,
    LeaseLostError,
    Reason,
    RefusedError,
    TransportError,
)
from graphstash_schema.protocol import (
    ADMIN_PREFIX,
    API_PREFIX,
    HEADER_LEASE,
    HEADER_METADATA,
    MAX_LOOKUP_KEYS,
    MAX_MANIFEST_ENTRIES,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from graphstash._tracing import Tracer
    from graphstash_schema.explanation import Description, ExplainResponse
    from graphstash_schema.history import History
    from graphstash_schema.listing import ArtifactList, ArtifactQuery, ListedArtifact
    from graphstash_schema.run import Run, RunList, RunName, RunReport

__all__ = ["ServerClient"]

_CHUNK_BYTES: Final = 1024**2

_VERIFY_SECONDS: Final = 5.0
"""A server reads some gigabytes in that time; if it needs longer, the next client retries."""

_EXCHANGE_SECONDS: Final = 10.0
"""The server may have to fetch the identity provider's keys, which takes up to 5 seconds."""

_Model = TypeVar("_Model", bound="BaseModel")


class ServerClient:
    """Calls one server; safe for many threads.

    Methods without a `namespace` argument use the one that the job writes to.

    Args:
        config: URL, namespaces, limits.
        tracer: makes each call a span.

    Raises:
        ConfigError: on construction, when a file that it names cannot be used.
    """

    def __init__(self, config: ClientConfig, *, tracer: Tracer | None = None) -> None:
        self.config = config
        self._transport = _transport(config, tracer)
        self._may_write = True

    @property
    def is_known(self) -> bool:
        """Whether there is a server; without one, every call raises `CacheError`."""
        return bool(self.config.url)

    def name_job(self, job: schema.ManifestName) -> None:
        """Says from now on which job the calls belong to."""
        self._transport.job = job

    def copy_only(self) -> None:
        """Says from now on that downloads are copies, which count neither as hits nor as misses;
        servers of earlier releases count them all the same.
        """
        self._transport.is_copying = True

    @property
    def is_read_only(self) -> bool:
        """Whether this job publishes nothing: by its settings, without a server, or refused."""
        return self.config.read_only or not self._may_write or not self.is_known

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def download(
        self,
        key: schema.ArtifactKey,
        target: IO[bytes],
        *,
        namespace: schema.Namespace | None = None,
        between_chunks: Callable[[], None] = lambda: None,
    ) -> Downloaded | None:
        """Writes an artifact's blob to the file `target` and checks its digest.

        What is given as `between_chunks` is called while bytes come.

        Returns:
            What came, None for a miss.

        Raises:
            CacheError: the server does not answer, or its bytes are not what it announced.
        """
        path = key.artifact_path(namespace or self.config.namespace)
        return download(
            self._transport, path, target, config=self.config, between_chunks=between_chunks
        )

    def upload(
        self,
        key: schema.ArtifactKey,
        blob: IO[bytes],
        digest: schema.Digest,
        metadata: schema.ArtifactMetadata,
    ) -> None:
        """Publishes a blob: the bytes at the beginning of a file that have the digest.

        Raises:
            ConflictError: other bytes are stored under the key and stay.
            CacheError: the server does not accept it.
        """
        with self._writing():
            answer = self._transport.upload(
                key.artifact_path(self.config.namespace),
                headers={"Repr-Digest": digest.repr_digest, HEADER_METADATA: metadata.to_header()},
                chunks=_read_chunks(blob, digest.size_bytes),
                size_bytes=digest.size_bytes,
            )
        if answer.headers.get("Repr-Digest") != digest.repr_digest:
            raise TransportError(
                Reason.PROTOCOL, f"{self.config.url} does not confirm that it has stored {key}"
            )

    def lookup(
        self,
        keys: Iterable[schema.ArtifactKey],
        *,
        namespace: schema.Namespace | None = None,
    ) -> schema.LookupResponse:
        """Asks which of many artifacts the server has; more than 1,000 take several calls.

        Raises:
            CacheError: the server does not answer.
        """
        wanted = tuple(keys)
        found: list[schema.ArtifactInfo] = []
        missing: list[schema.ArtifactKey] = []
        for start in range(0, len(wanted), MAX_LOOKUP_KEYS):
            request = schema.LookupRequest(keys=wanted[start : start + MAX_LOOKUP_KEYS])
            answer = self._post("lookup", request, namespace=namespace)
            reply = _parsed(schema.LookupResponse, answer)
            found += reply.found
            missing += reply.missing
        return schema.LookupResponse(found=tuple(found), missing=tuple(missing))

    def list_artifacts(self, query: ArtifactQuery) -> ArtifactList:
        """A page of the namespace's artifacts.

        Raises:
            CacheError: the server does not answer, or is older than this call.
        """
        from graphstash_schema.listing import ArtifactList

        wanted = query.model_dump(mode="json", exclude_defaults=True)
        return self._read(f"{API_PREFIX}/{self.config.namespace}/artifacts", wanted, ArtifactList)

    def every_artifact(self, query: ArtifactQuery) -> Iterator[ListedArtifact]:
        """The artifacts of a page and of all that follow, in constant memory.

        Raises:
            CacheError: as `list_artifacts`.
        """
        following: str | None = query.after
        while following is not None:
            page = self.list_artifacts(query.model_copy(update={"after": following}))
            yield from page.artifacts
            if page.next == following:  # a server that sends us round in a circle
                return
            following = page.next

    def verify(self, key: schema.ArtifactKey) -> schema.VerifyResponse:
        """Asks the server to read an artifact's blob again, and to drop it if it is damaged.

        Raises:
            CacheError: the server does not answer.
        """
        answer = self._post("verify", key, patience_seconds=_VERIFY_SECONDS)
        return _parsed(schema.VerifyResponse, answer)

    def describe(self, descriptions: Sequence[Description]) -> None:
        """Says what artifacts were made of, so that misses can be explained; as many as one call
        takes (`MAX_DESCRIPTIONS`).

        Raises:
            CacheError: the server does not accept it.
        """
        from graphstash_schema.explanation import DescribeRequest

        request = DescribeRequest(artifacts=tuple(descriptions))
        self._post("describe", request)

    def explain(self, wanted: Description) -> ExplainResponse:
        """The nearest artifacts to one that is missed.

        Raises:
            CacheError: the server does not answer.
        """
        answer = self._post("explain", wanted)
        from graphstash_schema.explanation import ExplainResponse

        return _parsed(ExplainResponse, answer)

    def report(
        self,
        key: schema.ArtifactKey,
        *,
        digest: schema.Digest,
        reason: schema.ReportReason,
        namespace: schema.Namespace | None = None,
    ) -> schema.ReportResponse:
        """Reports an artifact as wrong, so that an administrator reviews it.

        Raises:
            CacheError: the server does not accept it.
        """
        request = schema.ReportRequest(key=key, digest=str(digest), reason=reason)
        answer = self._post("report", request, namespace=namespace)
        return _parsed(schema.ReportResponse, answer)

    def _post(
        self,
        action: str,
        body: BaseModel,
        *,
        namespace: schema.Namespace | None = None,
        patience_seconds: float = 0.0,
    ) -> Answer:
        """Asks something of the artifacts of a namespace."""
        return self._transport.call(
            "POST",
            f"{API_PREFIX}/{namespace or self.config.namespace}/artifacts:{action}",
            json=body.model_dump_json().encode(),
            patience_seconds=patience_seconds,
        )

    def acquire(self, key: schema.ArtifactKey, *, wait_seconds: float = 0.0) -> schema.LeaseReply:
        """Acquires the right to compile; waits on the server while another job holds it.

        Raises:
            CacheError: the server does not answer.
        """
        request = schema.LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        with self._writing():
            answer = self._transport.call(
                "POST",
                key.lease_path(self.config.namespace),
                headers={"Prefer": f"wait={math.ceil(wait_seconds)}"},
                json=request.model_dump_json().encode(),
                patience_seconds=wait_seconds,
            )
        return _parsed(schema.LeaseReply, answer)

    def renew(self, key: schema.ArtifactKey, token: str) -> None:
        """Keeps a lease alive.

        Raises:
            LeaseLostError: it expired.
            CacheError: the server does not answer.
        """
        request = schema.LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        self._transport.call(
            "PUT",
            key.lease_path(self.config.namespace),
            headers={HEADER_LEASE: token},
            json=request.model_dump_json().encode(),
        )

    def release(self, key: schema.ArtifactKey, token: str, outcome: schema.LeaseOutcome) -> None:
        """Ends a lease; waiters fetch the artifact, or the next of them compiles.

        Raises:
            LeaseLostError: it had expired.
            CacheError: the server does not answer.
        """
        self._transport.call(
            "DELETE",
            f"{key.lease_path(self.config.namespace)}?outcome={outcome}",
            headers={HEADER_LEASE: token},
        )

    def manifest(self, name: schema.ManifestName) -> schema.Manifest | None:
        """The artifacts that earlier runs of a job used; None when there were none.

        Raises:
            CacheError: the server does not answer.
        """
        answer = self._transport.call("GET", self._manifest_path(name))
        return None if answer.status == 404 else _parsed(schema.Manifest, answer)

    def update_manifest(
        self, name: schema.ManifestName, keys: Iterable[schema.ArtifactKey]
    ) -> None:
        """Adds what this run used.

        Raises:
            CacheError: the server does not accept it.
        """
        newest = tuple(keys)[-MAX_MANIFEST_ENTRIES:]
        body = schema.ManifestUpdate(keys=newest).model_dump_json().encode()
        with self._writing():
            self._transport.call("PUT", self._manifest_path(name), json=body)

    def report_run(self, run: RunName, process: RunName, report: RunReport) -> None:
        """Says what one process of a run did; a report that is sent again replaces itself.

        Raises:
            CacheError: the server does not accept it; earlier ones have no such call.
        """
        self._transport.call(
            "PUT",
            f"{API_PREFIX}/{self.config.namespace}/runs/{run}/{process}",
            json=report.model_dump_json().encode(),
        )

    def server_stats(self) -> schema.ServerStats:
        """The server's statistics.

        Raises:
            CacheError: the server does not answer.
        """
        return _parsed(schema.ServerStats, self._transport.call("GET", f"{API_PREFIX}/stats"))

    def runs(self, job: schema.ManifestName | None = None, *, limit: int = 20) -> RunList:
        """The runs of a namespace, or of one job in it, that reported last, without their misses.

        Raises:
            CacheError: the server does not answer, or is older than this call.
        """
        from graphstash_schema.run import RunList

        wanted = {"limit": limit, **({} if job is None else {"job": job})}
        return self._read(f"{API_PREFIX}/{self.config.namespace}/runs", wanted, RunList)

    def run(self, name: RunName) -> Run:
        """One run, with what it missed.

        Raises:
            CacheError: there is none, or the server does not answer.
        """
        from graphstash_schema.run import Run

        return self._read(f"{API_PREFIX}/{self.config.namespace}/runs/{name}", {}, Run)

    def history(self, **wanted: str) -> History:
        """What the server did, by hour or by day; `wanted` is the query of `GET /v1/stats/history`.

        Raises:
            CacheError: the server does not answer, or is older than this call.
        """
        from graphstash_schema.history import History

        return self._read(f"{API_PREFIX}/stats/history", wanted, History)

    def _read(self, path: str, query: Mapping[str, object], model: type[_Model]) -> _Model:
        """Reads something of which a 404 is no miss."""
        from urllib.parse import urlencode

        answer = self._transport.call("GET", f"{path}?{urlencode(query)}" if query else path)
        if answer.status == 404:
            raise _refused(answer, self.config)
        return _parsed(model, answer)

    def exchange(self, request: schema.TokenExchange) -> schema.TokenIssued:
        """Exchanges the JWT that the configuration has as its token for a token of the server.

        Raises:
            CacheError: the server does not accept it.
        """
        answer = self._transport.call(
            "POST",
            f"{ADMIN_PREFIX}/tokens:exchange",
            json=request.model_dump_json(exclude_none=True).encode(),
            patience_seconds=_EXCHANGE_SECONDS,
        )
        return _parsed(schema.TokenIssued, answer)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """After a write without the right to, this job only reads."""
        try:
            yield
        except (ConflictError, LeaseLostError):
            raise
        except RefusedError as error:
            # A namespace that a token cannot even read answers 404. Without a token, 401 says the
            # same, and reading may still work.
            is_right_missing = error.status in (403, 404)
            if not is_right_missing and not (error.status == 401 and self._transport.is_anonymous):
                raise
            self._may_write = False
            told = f"{error.detail}; this job publishes nothing from now on"
            raise RefusedError(told, code=error.code, status=error.status) from None

    def _manifest_path(self, name: schema.ManifestName) -> str:
        return f"{API_PREFIX}/{self.config.namespace}/manifests/{name}"


def _transport(config: ClientConfig, tracer: Tracer | None) -> Transport:
    if tracer is None:
        return Transport(config)
    from graphstash._http.traced import TracedTransport

    return TracedTransport(config, tracer=tracer)


def _read_chunks(file: IO[bytes], size_bytes: int) -> Iterator[bytes]:
    file.seek(0)
    envelope = BoundedReader(file, size_bytes)  # its provenance follows it in the file
    while chunk := envelope.read(_CHUNK_BYTES):
        yield chunk


def _refused(answer: Answer, config: ClientConfig) -> RefusedError:
    """What the 404 of a GET that is no miss says."""
    problem = problem_of(answer.body)
    if problem is not None and problem.code is schema.ErrorCode.UNKNOWN_PATH:
        told = f"{config.url} is older than this command"
    else:
        told = problem.detail if problem else f"{config.url} answered 404"
    return RefusedError(told, code=problem.code if problem else None, status=404)


def _parsed(model: type[_Model], answer: Answer) -> _Model:
    from pydantic import ValidationError

    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise TransportError(
            Reason.PROTOCOL, f"not a {model.__name__}: {where}: {first['msg']}"
        ) from None
