"""ServerClient: one method for each call of the server's API.

The client checks a blob only against the digest that the server announces; `_artifacts` parses the
content. `schema` imports each wire model when it is first used, because most jobs need only a few.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import IO, TYPE_CHECKING, Final, TypeVar

import graphstash_schema as schema
from graphstash._bounded_reader import BoundedReader
from graphstash._forking import unforked
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
    HEADER_WITHDRAWALS,
    HEADER_WRITERS,
    MAX_LOOKUP_KEYS,
    MAX_MANIFEST_ENTRIES,
)

if TYPE_CHECKING:
    import ssl

    from pydantic import BaseModel

    from graphstash._http.download import Downloaded
    from graphstash._http.transport import Answer, Transport
    from graphstash._tracing import Tracer
    from graphstash_schema.explanation import Description, ExplainResponse
    from graphstash_schema.history import History, HistoryQuery
    from graphstash_schema.lease import HeldLeases
    from graphstash_schema.listing import ArtifactList, ArtifactQuery, ListedArtifact
    from graphstash_schema.run import Run, RunList, RunName, RunQuery, RunReport, RunTimes
    from graphstash_schema.withdrawals import WithdrawalList, WithdrawalQuery

__all__ = ["ServerClient"]

_CHUNK_BYTES: Final = 1024**2

_VERIFY_SECONDS: Final = 5.0
"""Enough to read several gigabytes. After a timeout, the server finishes the check and drops a
damaged artifact, but does not tell this client."""

_EXCHANGE_SECONDS: Final = 10.0
"""Long enough for a server that first fetches the identity provider's keys, in up to 5 seconds."""

_Model = TypeVar("_Model", bound="BaseModel")


class ServerClient:
    """Calls one server. Thread-safe.

    Methods without a `namespace` argument use the namespace that the job writes to. Every call
    raises `CacheError` if the server does not answer, refuses the call, or is too old for it.

    Attributes:
        may_write: false once the server has refused a write for lack of permission.

    Args:
        tracer: records each call as a span.
        announced: table of the compile times that look-ups announce, to share with another client.
        context: TLS context of another client with the same settings. Ignored if there is a tracer.

    Raises:
        ConfigError: the constructor cannot use a file that `config` names.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        tracer: Tracer | None = None,
        announced: dict[schema.ArtifactKey, float] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.config = config
        self._tracer = tracer
        self._context = context
        self._job = config.job
        self._is_copying = False
        self._opening = threading.Lock()  # guards the field below
        self._opened: Transport | None = None
        self._announced = {} if announced is None else announced
        self.may_write = True
        if tracer is not None or config.ca_file or config.client_cert:
            self._transport  # noqa: B018 - report a file error now, not at the first call

    @property
    def _transport(self) -> Transport:
        """The transport, created on first use: jobs that make no call should not import httpx."""
        if self._opened is None:
            with unforked(), self._opening:
                if self._opened is None:
                    self._opened = self._new_transport()
        self._opened.job, self._opened.is_copying = self._job, self._is_copying
        return self._opened

    def _new_transport(self) -> Transport:
        if self._tracer is None:
            from graphstash._http.transport import Transport

            return Transport(self.config, context=self._context)
        from graphstash._http.traced import TracedTransport

        return TracedTransport(self.config, tracer=self._tracer)

    @property
    def is_configured(self) -> bool:
        """Whether a server is configured. Without a server, every call raises `CacheError`."""
        return bool(self.config.url)

    def compile_seconds(self, key: schema.ArtifactKey) -> float | None:
        """Return the compile time that a look-up announced for an artifact, or None."""
        return self._announced.get(key)

    def with_own_connections(self) -> ServerClient:
        """Return a client with separate connections and the same table of announced compile times.

        It shares the TLS context, because the certificate files may have vanished meanwhile.
        """
        context = self._context if self._opened is None else self._opened.context
        return ServerClient(self.config, announced=self._announced, context=context)

    def pause(self, seconds: float) -> None:
        """Make no call for some seconds: the server is busy and the job must not wait."""
        self._transport.pause(seconds)

    def name_job(self, job: schema.ManifestName) -> None:
        """Send this job name with all further calls."""
        self._job = job

    def copy_only(self) -> None:
        """Mark further downloads as copies, which the server excludes from the hit rate. Earlier
        releases ignore the mark.
        """
        self._is_copying = True

    @property
    def is_read_only(self) -> bool:
        """Whether this job publishes nothing: by its configuration, or after a refused write."""
        return self.config.read_only or not self.may_write or not self.is_configured

    def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            self._opened.close()

    def download(
        self,
        key: schema.ArtifactKey,
        target: IO[bytes],
        *,
        namespace: schema.Namespace | None = None,
        between_chunks: Callable[[], None] = lambda: None,
    ) -> Downloaded | None:
        """Write an artifact's blob to `target` and check its digest. Return None for a miss.

        Raises:
            CacheError: the server does not answer, or the bytes do not match the announced digest.
        """
        path = key.artifact_path(namespace or self.config.namespace)
        from graphstash._http.download import download

        return download(
            self._transport, path, target, config=self.config, between_chunks=between_chunks
        )

    def upload(
        self,
        key: schema.ArtifactKey,
        blob: IO[bytes],
        digest: schema.Digest,
        metadata: schema.ArtifactMetadata,
        *,
        withdrawals: str | None = None,
        between_chunks: Callable[[], None] = lambda: None,
    ) -> None:
        """Publish the leading bytes of `blob` that `digest` covers. The server answers 412 if its
        list of withdrawals names them after the position `withdrawals`.

        Raises:
            ConflictError: the server keeps different bytes under this key.
        """
        headers = {"Repr-Digest": digest.repr_digest, HEADER_METADATA: metadata.to_header()}
        if withdrawals is not None:
            headers[HEADER_WITHDRAWALS] = withdrawals
        with self._writing():
            answer = self._transport.upload(
                key.artifact_path(self.config.namespace),
                headers=headers,
                chunks=partial(_read_chunks, blob, digest.size_bytes, between_chunks),
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
        """Ask the server which of these artifacts it has, in batches of up to 1,000 keys. Drop
        artifacts in its response whose keys were not requested.
        """
        requested = tuple(keys)
        known = set(requested)
        found: dict[schema.ArtifactKey, schema.ArtifactInfo] = {}
        missing: list[schema.ArtifactKey] = []
        withdrawn: list[schema.ArtifactInfo] = []
        newest: str | None = None
        for start in range(0, len(requested), MAX_LOOKUP_KEYS):
            request = schema.LookupRequest(keys=requested[start : start + MAX_LOOKUP_KEYS])
            answer = self._post("lookup", request, namespace=namespace)
            reply = _parse(schema.LookupResponse, answer)
            found |= {each.key: each for each in reply.found if each.key in known}
            self._announced |= {
                each.key: each.compile_seconds
                for each in reply.found
                if each.compile_seconds is not None and each.key in known
            }
            missing += reply.missing
            withdrawn += (each for each in reply.withdrawn if each.key in known)
            newest = reply.newest_withdrawal
        return schema.LookupResponse(
            found=tuple(found.values()),
            missing=tuple(missing),
            withdrawn=tuple(withdrawn),
            newest_withdrawal=newest,
        )

    def withdrawals(self, query: WithdrawalQuery, *, namespace: schema.Namespace) -> WithdrawalList:
        """Return one page of the withdrawals in a namespace."""
        from graphstash_schema.withdrawals import WithdrawalList

        return self._read(f"{API_PREFIX}/{namespace}/withdrawals", WithdrawalList, query)

    def list_artifacts(
        self, query: ArtifactQuery, *, namespace: schema.Namespace | None = None
    ) -> ArtifactList:
        """Return one page of the artifacts of a namespace, by default the configured one."""
        from graphstash_schema.listing import ArtifactList

        path = f"{API_PREFIX}/{namespace or self.config.namespace}/artifacts"
        return self._read(path, ArtifactList, query)

    def every_artifact(
        self, query: ArtifactQuery, *, namespace: schema.Namespace | None = None
    ) -> Iterator[ListedArtifact]:
        """Iterate over the artifacts of this page and all following pages, one page in memory."""
        following: str | None = query.after
        while following is not None:
            page = self.list_artifacts(
                query.model_copy(update={"after": following}), namespace=namespace
            )
            yield from page.artifacts
            if page.next == following:  # the server repeats a page: do not loop forever
                return
            following = page.next

    def verify(self, key: schema.ArtifactKey) -> schema.VerifyResponse:
        """Ask the server to read an artifact's blob, and to drop the artifact if it is damaged."""
        answer = self._post("verify", asdict(key), patience_seconds=_VERIFY_SECONDS)
        return _parse(schema.VerifyResponse, answer)

    def describe(self, descriptions: Sequence[Description]) -> None:
        """Upload up to `MAX_DESCRIPTIONS` descriptions. The server explains misses with them."""
        from graphstash_schema.explanation import DescribeRequest

        request = DescribeRequest(artifacts=tuple(descriptions))
        self._post("describe", request)

    def explain(self, missing: Description, *, min_age_seconds: float = 0.0) -> ExplainResponse:
        """Return the stored artifacts that are nearest to a missing artifact, without those younger
        than the run that missed it (`min_age_seconds`). Earlier releases include these.
        """
        answer = self._post(f"explain?min_age_seconds={min_age_seconds:.3f}", missing)
        from graphstash_schema.explanation import ExplainResponse

        return _parse(ExplainResponse, answer)

    def report(
        self,
        key: schema.ArtifactKey,
        *,
        digest: schema.Digest,
        reason: schema.ReportReason,
        namespace: schema.Namespace | None = None,
    ) -> schema.ReportResponse:
        """Report an artifact as wrong, so that an administrator reviews it."""
        request = schema.ReportRequest(key=key, digest=str(digest), reason=reason)
        answer = self._post("report", request, namespace=namespace)
        return _parse(schema.ReportResponse, answer)

    def _post(
        self,
        action: str,
        body: BaseModel | Mapping[str, str],
        *,
        namespace: schema.Namespace | None = None,
        patience_seconds: float = 0.0,
    ) -> Answer:
        text = json.dumps(body) if isinstance(body, Mapping) else body.model_dump_json()
        return self._transport.call(
            "POST",
            f"{API_PREFIX}/{namespace or self.config.namespace}/artifacts:{action}",
            json=text.encode(),
            patience_seconds=patience_seconds,
        )

    def acquire(self, key: schema.ArtifactKey, *, wait_seconds: float = 0.0) -> schema.LeaseReply:
        """Acquire the lease to compile, after waiting up to `wait_seconds` for another holder."""
        request = schema.LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        with self._writing():
            answer = self._transport.call(
                "POST",
                key.lease_path(self.config.namespace),
                headers={"Prefer": f"wait={math.ceil(wait_seconds)}"},
                json=request.model_dump_json().encode(),
                patience_seconds=wait_seconds,
            )
        return _parse(schema.LeaseReply, answer)

    def renew(self, key: schema.ArtifactKey, token: str) -> None:
        """Renew a lease. Raises `LeaseLostError` if it has ended or another job holds it."""
        request = schema.LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        self._transport.call(
            "PUT",
            key.lease_path(self.config.namespace),
            headers={HEADER_LEASE: token},
            json=request.model_dump_json().encode(),
        )

    def release(self, key: schema.ArtifactKey, token: str, outcome: schema.LeaseOutcome) -> None:
        """Release a lease. If the server has the artifact by then, all waiters fetch it. Otherwise
        the next waiter gets the lease. The server does not rely on `outcome`.

        Raises:
            LeaseLostError: the lease had expired.
        """
        self._transport.call(
            "DELETE",
            f"{key.lease_path(self.config.namespace)}?outcome={outcome}",
            headers={HEADER_LEASE: token},
        )

    def manifest(self, name: schema.ManifestName) -> schema.Manifest | None:
        """Return the artifacts that earlier runs of a job used, or None if there is no manifest."""
        answer = self._transport.call(
            "GET", self._manifest_path(name), headers={HEADER_WRITERS: "1"}
        )
        return None if answer.status == 404 else _parse(schema.Manifest, answer)

    def update_manifest(
        self, name: schema.ManifestName, keys: Iterable[schema.ArtifactKey]
    ) -> None:
        """Add the last 4,096 of these keys, the artifacts of this run, to a job's manifest."""
        newest = tuple(keys)[-MAX_MANIFEST_ENTRIES:]
        body = schema.ManifestUpdate(keys=newest).model_dump_json().encode()
        with self._writing():
            self._transport.call("PUT", self._manifest_path(name), json=body)

    def report_run(
        self, run: RunName, process: RunName, report: RunReport, times: RunTimes
    ) -> None:
        """Store the report of one process of a run. A repeated report replaces the earlier one.

        Servers of earlier releases ignore `times`.
        """
        path = f"{API_PREFIX}/{self.config.namespace}/runs/{run}/{process}"
        self._transport.call(
            "PUT", _with_query(path, times), json=report.model_dump_json().encode()
        )

    def server_stats(self) -> schema.ServerStats:
        """Return the server's statistics."""
        return self._read(f"{API_PREFIX}/stats", schema.ServerStats)

    def runs(self, query: RunQuery) -> RunList:
        """Return the latest runs, without misses."""
        from graphstash_schema.run import RunList

        return self._read(f"{API_PREFIX}/{self.config.namespace}/runs", RunList, query)

    def run(self, name: RunName) -> Run:
        """Return one run with its misses. An unknown run is a `CacheError`."""
        from graphstash_schema.run import Run

        return self._read(f"{API_PREFIX}/{self.config.namespace}/runs/{name}", Run)

    def history(self, query: HistoryQuery) -> History:
        """Return the server's history by hour or by day."""
        from graphstash_schema.history import History

        return self._read(f"{API_PREFIX}/stats/history", History, query)

    def held_leases(self) -> HeldLeases:
        """Return the running compilations of the namespace."""
        from graphstash_schema.lease import HeldLeases

        return self._read(f"{API_PREFIX}/{self.config.namespace}/leases", HeldLeases)

    def _read(self, path: str, model: type[_Model], query: BaseModel | None = None) -> _Model:
        """Make a GET whose 404 is an error, not a miss."""
        answer = self._transport.call("GET", _with_query(path, query))
        if answer.status == 404:
            raise _refusal_of(answer, self.config)
        return _parse(model, answer)

    def exchange(self, request: schema.TokenExchange) -> schema.TokenIssued:
        """Exchange the JWT in `config.token` for a token of the server."""
        answer = self._transport.call(
            "POST",
            f"{ADMIN_PREFIX}/tokens:exchange",
            json=request.model_dump_json(exclude_none=True).encode(),
            patience_seconds=_EXCHANGE_SECONDS,
        )
        return _parse(schema.TokenIssued, answer)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (ConflictError, LeaseLostError):
            raise
        except RefusedError as error:
            # The server answers 404 for a namespace that the token cannot even read. Without a
            # token, 401 also means that writing is not allowed; reading may still work.
            is_right_missing = error.status in (403, 404)
            if not is_right_missing and not (error.status == 401 and self._transport.is_anonymous):
                raise
            self.may_write = False
            detail = f"{error.detail}; this job publishes nothing from now on"
            # Count an invisible namespace as forbidden, but not a wrong path in the URL.
            status = 403 if error.code is schema.ErrorCode.NOT_FOUND else error.status
            raise RefusedError(detail, code=error.code, status=status) from None

    def _manifest_path(self, name: schema.ManifestName) -> str:
        return f"{API_PREFIX}/{self.config.namespace}/manifests/{name}"


def _read_chunks(
    file: IO[bytes], size_bytes: int, between_chunks: Callable[[], None]
) -> Iterator[bytes]:
    file.seek(0)
    envelope = BoundedReader(file, size_bytes)  # provenance follows the envelope in the file
    while chunk := envelope.read(_CHUNK_BYTES):
        between_chunks()
        yield chunk


def _refusal_of(answer: Answer, config: ClientConfig) -> RefusedError:
    """Return the error for a 404 that is not a miss."""
    from graphstash._http.errors import problem_of

    problem = problem_of(answer.body)
    if problem is not None and problem.code is schema.ErrorCode.UNKNOWN_PATH:
        detail = f"{config.url} is older than this command, or its path is wrong"
    else:
        detail = problem.detail if problem else f"{config.url} answered 404"
    return RefusedError(detail, code=problem.code if problem else None, status=404)


def _with_query(path: str, query: BaseModel | None) -> str:
    from urllib.parse import urlencode

    fields = query.model_dump(mode="json", exclude_defaults=True) if query is not None else {}
    return f"{path}?{urlencode(fields)}" if fields else path


def _parse(model: type[_Model], answer: Answer) -> _Model:
    from pydantic import ValidationError

    from graphstash_schema.model import first_error

    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        what = f"not a {model.__name__}: {first_error(error, whole='the answer')}"
        raise TransportError(Reason.PROTOCOL, what) from None
