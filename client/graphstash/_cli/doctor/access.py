"""Access: what the server allows this job to do."""

import secrets
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import ValidationError

from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, skipped, warn
from graphstash._http.client import ServerClient
from graphstash._http.credentials import Credentials
from graphstash._http.transport import Answer, Transport
from graphstash.config import ClientConfig, is_on_this_host, netrc_path
from graphstash.errors import CacheError, RefusedError
from graphstash_schema import ArtifactKey, ArtifactKind, DeviceType, Fingerprint, LeaseOutcome
from graphstash_schema.access import Access, AccessKind, Scope
from graphstash_schema.protocol import ADMIN_PREFIX, API_PREFIX

__all__ = ["check_access", "probe_lease"]

_EXPIRES_SOON: Final = timedelta(days=7)


def check_access(config: ClientConfig) -> Topic[None]:
    """Check the token, and which namespaces this job may read and write."""
    try:
        source = _source_of_token(config)
    except CacheError as error:
        yield fail("token", f"{error}", "make the file readable by this user only (chmod 600)")
        return
    if source and config.url.startswith("http:") and not is_on_this_host(config.url):
        yield warn(
            "token",
            f"the token is sent unencrypted to {config.url}",
            "anyone on the network can read it: configure TLS on the server and set GRAPHSTASH_URL "
            "to https://",
        )
    path = f"{ADMIN_PREFIX}/access"
    try:
        answer = _ask(config, path)
        if answer.status == 404:
            yield _older_server(source)
            return
        access = Access.model_validate_json(answer.body)
    except ValidationError:
        yield fail("token", f"GET {path}: unexpected response", "a proxy must not change responses")
        return
    except CacheError as error:
        if isinstance(error, RefusedError) and error.status == 401:
            yield _unauthenticated(config, source)
        else:
            yield fail(
                "token", f"GET {path}: {error}", "run the doctor again; see the server's log"
            )
        return
    yield _caller(access, source)
    if access.kind is not AccessKind.OPEN:
        yield from _rights(config, access)


def _ask(config: ClientConfig, path: str) -> Answer:
    with closing(Transport(config)) as transport:
        return transport.call("GET", path)


def _source_of_token(config: ClientConfig) -> str | None:
    """Return where the token comes from, or None without a token.

    Raises:
        CacheError: the token file cannot be read.
    """
    token = Credentials(config).token()
    return config.token_source or (str(netrc_path()) if token else None)


def _unauthenticated(config: ClientConfig, source: str | None) -> Finding:
    if source is not None:
        return fail(
            "token",
            f"the server rejected the token from {source}: unknown, expired or revoked",
            "ask an administrator for a new one (`graphstash token list` shows expired and revoked "
            f"tokens, {_creation(config)} creates one)",
        )
    if _is_open_for_reading(config):
        return warn(
            "token",
            f"none is set: {config.namespace!r} is readable without a token, but not writable",
            f"to publish, ask an administrator for a token ({_creation(config)}) and set "
            "GRAPHSTASH_TOKEN; or set GRAPHSTASH_READ_ONLY=true",
        )
    return fail(
        "token",
        "the server requires a token, and none is set",
        f"ask an administrator for one ({_creation(config)}) and set GRAPHSTASH_TOKEN, or "
        "GRAPHSTASH_TOKEN_FILE to a file that holds it",
    )


def _creation(config: ClientConfig) -> str:
    scope = Scope.READ if config.read_only else Scope.WRITE
    return f"`graphstash token create --grant {scope}:{config.namespace} --description ...`"


def _is_open_for_reading(config: ClientConfig) -> bool:
    """Request a manifest that does not exist: if reading is allowed, the server answers 404."""
    path = f"{API_PREFIX}/{config.namespace}/manifests/doctor-{secrets.token_hex(8)}"
    try:
        return _ask(config, path).status == 404
    except CacheError:
        return False


def _older_server(source: str | None) -> Finding:
    text = "the server's release has no authentication: anyone who can reach it can read and write"
    if source is None:
        return ok("token", text)
    return warn("token", text, f"upgrade the server: it does not check the token from {source}")


def _caller(access: Access, source: str | None) -> Finding:
    if access.kind is AccessKind.OWNER:
        return ok("token", "none is needed: only this user can reach the server's socket")
    if access.kind is AccessKind.OPEN:
        needless = f"; the token from {source} is not needed" if source else ""
        return ok("token", f"the server does not require a token{needless}")
    granted = ", ".join(map(str, access.grants)) or "nothing"
    summary = f"{access.name}, from {source}, grants {granted}"
    if access.expires_at is None:
        return ok("token", f"{summary}; it does not expire")
    left = access.expires_at - datetime.now(UTC)
    summary = f"{summary}; it expires in {_days_or_hours(left)}"
    # JWTs last minutes, and the tokens exchanged for them last hours, so do not warn about them.
    is_lasting = access.kind is AccessKind.TOKEN and access.issuer is None
    if left < _EXPIRES_SOON and is_lasting:
        return warn(
            "token",
            summary,
            f"get a new one before {access.expires_at:%Y-%m-%d %H:%M} UTC; after that, jobs run "
            "without the cache",
        )
    return ok("token", summary)


def _days_or_hours(left: timedelta) -> str:
    return f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.1f} hours"


def _rights(config: ClientConfig, access: Access) -> Topic[None]:
    for namespace in config.readable:
        if not access.allows(Scope.READ, namespace):
            yield fail(
                "namespace",
                f"the token does not grant read access to {namespace!r}",
                f"get a token with the grant {Scope.READ}:{namespace}, or set "
                "GRAPHSTASH_NAMESPACE to one that it covers",
            )
    if access.allows(Scope.WRITE, config.namespace):
        yield ok("namespace", f"can read and write {config.namespace!r}")
    elif access.allows(Scope.READ, config.namespace):
        summary = f"can read {config.namespace!r}, but not write"
        if config.read_only:
            yield ok("namespace", f"{summary}, and GRAPHSTASH_READ_ONLY is set")
        else:
            yield warn(
                "namespace",
                f"{summary}: what this job compiles is not shared",
                f"get a token with the grant {Scope.WRITE}:{config.namespace}, or set "
                "GRAPHSTASH_READ_ONLY=true if that is intended",
            )


def probe_lease(config: ClientConfig) -> Topic[None]:
    """Acquire and release a lease, as a job with write access does before it compiles.

    The lease has a random key and is released as failed. It produces no artifact, no other job
    waits for it, and the server deletes it like any ended lease.
    """
    if config.read_only:
        yield skipped("write probe", "GRAPHSTASH_READ_ONLY: this job takes no leases")
        return
    key = ArtifactKey(
        kind=ArtifactKind.SCHEDULE,
        device_type=DeviceType("doctor"),
        fingerprint=Fingerprint(secrets.token_hex(32)),
    )
    with closing(ServerClient(config)) as remote:
        try:
            lease = remote.acquire(key)
            if lease.token is not None:
                remote.release(key, lease.token, LeaseOutcome.FAILED)
        except RefusedError as error:
            yield fail(
                "write probe",
                f"the server refuses a lease in {config.namespace!r}: {error}",
                "get a token that grants write access, or set GRAPHSTASH_READ_ONLY=true",
            )
            return
        except CacheError as error:
            yield fail("write probe", f"no lease: {error}", "see the server's log")
            return
    yield ok("write probe", f"a lease in {config.namespace!r} was taken and released")
