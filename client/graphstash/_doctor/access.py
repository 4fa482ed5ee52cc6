"""Access: what the server lets this job do."""

import secrets
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import ValidationError

from graphstash._answers import Answer
from graphstash._config import ClientConfig, netrc_path
from graphstash._credentials import Credentials
from graphstash._doctor.findings import Finding, Topic, fail, ok, warn
from graphstash._doctor.server import Way
from graphstash._errors import CacheError, RefusedError
from graphstash._transport import Transport
from graphstash_schema.access import Access, AccessKind, Scope
from graphstash_schema.protocol import ADMIN_PREFIX, API_PREFIX

__all__ = ["check_access"]

_EXPIRES_SOON: Final = timedelta(days=7)


def check_access(config: ClientConfig, way: Way) -> Topic[None]:
    """Who this job is to the server, and what of its namespaces it may read and write."""
    try:
        source = _source_of_token(config)
    except CacheError as error:
        yield fail("token", f"{error}", "let this user read the file, and nobody else (chmod 600)")
        return
    if source is not None and config.url.startswith("http:") and not way.is_loopback:
        yield warn(
            "token",
            f"the token goes in the clear to {config.url}",
            "whoever is on the way can read and use it: give the server a certificate and set "
            "GRAPHSTASH_URL to https://",
        )
    try:
        answer = _ask(config, f"{ADMIN_PREFIX}/access")
    except RefusedError as error:
        if error.status == 401:
            yield _unauthenticated(config, source)
        else:
            yield fail("token", f"GET {ADMIN_PREFIX}/access: {error}", "its log has the reason")
        return
    except CacheError as error:
        yield fail("token", f"GET {ADMIN_PREFIX}/access: {error}", "ask again; see its log")
        return
    if answer.status == 404:
        yield _older_server(source)
        return
    try:
        access = Access.model_validate_json(answer.body)
    except ValidationError:
        yield fail(
            "token",
            f"GET {ADMIN_PREFIX}/access answered something else than a description of access",
            "a proxy in between must pass answers on as they are",
        )
        return
    yield _who(access, source)
    if access.kind is not AccessKind.OPEN:
        yield from _rights(config, access)


def _ask(config: ClientConfig, path: str) -> Answer:
    """Asks as a job does, credentials and all."""
    with closing(Transport(config)) as transport:
        return transport.call("GET", path)


def _source_of_token(config: ClientConfig) -> str | None:
    """Where the token comes from; None when there is none.

    Raises:
        CacheError: its file cannot be read.
    """
    token = Credentials(config).token()
    if config.token is not None:
        return "GRAPHSTASH_TOKEN"
    if config.token_file is not None:
        return f"GRAPHSTASH_TOKEN_FILE={config.token_file}"
    return str(netrc_path()) if token else None


def _unauthenticated(config: ClientConfig, source: str | None) -> Finding:
    if source is not None:
        return fail(
            "token",
            f"the server does not take the token of {source}: unknown there, expired or revoked",
            "ask its administrators for a new one (`graphstash token list` tells them which one "
            f"ended, {_creation(config)} makes one)",
        )
    if _is_open_for_reading(config):
        return warn(
            "token",
            f"none is set: everybody may read {config.namespace!r}, but not publish",
            f"to publish, get a token from its administrators ({_creation(config)}) and set "
            "GRAPHSTASH_TOKEN; else GRAPHSTASH_READ_ONLY=true spares the tries",
        )
    return fail(
        "token",
        "the server asks for a token, and none is set",
        f"get one from its administrators ({_creation(config)}) and set GRAPHSTASH_TOKEN, or "
        "GRAPHSTASH_TOKEN_FILE to a file that holds it",
    )


def _creation(config: ClientConfig) -> str:
    scope = Scope.READ if config.read_only else Scope.WRITE
    return f"`graphstash token create --grant {scope}:{config.namespace} --description ...`"


def _is_open_for_reading(config: ClientConfig) -> bool:
    """Asks for a manifest that nobody has: absent for who may read, refused for who may not."""
    path = f"{API_PREFIX}/{config.namespace}/manifests/doctor-{secrets.token_hex(8)}"
    try:
        return _ask(config, path).status == 404
    except CacheError:
        return False


def _older_server(source: str | None) -> Finding:
    told = "the server is of a release that knows no tokens: whoever reaches it reads and writes"
    if source is None:
        return ok("token", told)
    return warn("token", told, f"upgrade it before it is to check the token of {source}")


def _who(access: Access, source: str | None) -> Finding:
    if access.kind is AccessKind.OPEN:
        needless = f"; the token of {source} is not needed" if source else ""
        return ok("token", f"the server asks nobody who they are{needless}")
    granted = ", ".join(map(str, access.grants)) or "nothing"
    told = f"{access.name}, from {source}, is granted {granted}"
    if access.expires_at is None:
        return ok("token", f"{told}; it does not expire")
    left = access.expires_at - datetime.now(UTC)
    told = f"{told}; it expires in {_days_or_hours(left)}"
    # Identity providers issue tokens for minutes and issue new ones all the time.
    if left < _EXPIRES_SOON and access.kind is AccessKind.TOKEN:
        return warn(
            "token",
            told,
            f"get a new one before {access.expires_at:%Y-%m-%d %H:%M} UTC, or jobs "
            "go on without the cache then",
        )
    return ok("token", told)


def _days_or_hours(left: timedelta) -> str:
    return f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.1f} hours"


def _rights(config: ClientConfig, access: Access) -> Topic[None]:
    for namespace in config.readable:
        if not access.allows(Scope.READ, namespace):
            yield fail(
                "namespace",
                f"the token does not let this job read {namespace!r}: to it, nothing is there",
                f"get a token with the grant {Scope.READ}:{namespace}, or set "
                "GRAPHSTASH_NAMESPACE to one that it names",
            )
    if access.allows(Scope.WRITE, config.namespace):
        yield ok("namespace", f"{config.namespace!r} may be read and written")
    elif access.allows(Scope.READ, config.namespace):
        told = f"{config.namespace!r} may be read, not written"
        if config.read_only:
            yield ok("namespace", f"{told}, and GRAPHSTASH_READ_ONLY is set")
        else:
            yield warn(
                "namespace",
                f"{told}: what this job compiles is not shared",
                f"get a token with the grant {Scope.WRITE}:{config.namespace}, or set "
                "GRAPHSTASH_READ_ONLY=true to say that this is meant",
            )
