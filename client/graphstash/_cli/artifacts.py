"""`graphstash ls`, `show` and `forget`: artifacts of a namespace and of this host."""

import heapq
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from graphstash._cli.output import (
    Json,
    NamespaceOption,
    Url,
    count_progress,
    err,
    fail,
    format_age,
    format_bytes,
    format_seconds,
    load_config,
    print_json,
    print_table,
    say,
    shown,
)
from graphstash.config import ClientConfig, SignaturePolicy
from graphstash.errors import CacheError, RefusedError
from graphstash_schema import (
    ArtifactKey,
    ArtifactKind,
    Digest,
    ErrorCode,
    InvalidValueError,
    Namespace,
)
from graphstash_schema.exit_status import ExitStatus
from graphstash_schema.explanation import is_of_program
from graphstash_schema.listing import ArtifactQuery, ListedArtifact, ListOrder

if TYPE_CHECKING:
    from graphstash._http.client import ServerClient

__all__ = [
    "DeviceTypeOption",
    "KindOption",
    "find_one",
    "forget",
    "is_prefix",
    "ls",
    "option_error",
    "show",
]

KindOption = Annotated[
    ArtifactKind | None,
    typer.Option(metavar="KIND", help=f"Only artifacts of this kind: {', '.join(ArtifactKind)}."),
]
DeviceTypeOption = Annotated[
    str | None, typer.Option(help="Only artifacts for this device type, e.g. `cuda-sm_90`.")
]

_MIN_PREFIX: Final = 4
_SHOWN_FINGERPRINT: Final = 12
_SHOWN_VALUE: Final = 300
_NOTHING_KEPT: Final = "GRAPHSTASH_LOCAL_LIMIT=0: this host keeps nothing between jobs"


class Sort(StrEnum):
    """Orders of `ls`."""

    NEWEST = "newest"
    FINGERPRINT = "fingerprint"
    SIZE = "size"
    COMPILE = "compile"
    HITS = "hits"
    USED = "used"


_ORDERS: Final = {
    Sort.NEWEST: ListOrder.NEWEST,
    Sort.FINGERPRINT: ListOrder.FINGERPRINT,
    Sort.SIZE: ListOrder.SIZE,
}

_SORT_KEYS: Final[dict[Sort, Callable[[ListedArtifact], Any]]] = {
    Sort.SIZE: lambda each: each.size_bytes,  # for servers of earlier releases
    Sort.COMPILE: lambda each: each.metadata.compile_seconds if each.metadata else 0.0,
    Sort.HITS: lambda each: each.hits,
    Sort.USED: lambda each: each.last_used_at,
}
"""Sort keys of the orders in which a server may not list artifacts. `ls` then reads the whole list
and sorts it."""


def ls(
    label: Annotated[
        str, typer.Argument(help="Only artifacts whose label contains this text, ignoring case.")
    ] = "",
    *,
    kind: KindOption = None,
    device_type: DeviceTypeOption = None,
    sort: Annotated[
        Sort,
        typer.Option(
            metavar="ORDER",
            help=f"Order of the list: {', '.join(Sort)}. For the last three, the command reads the "
            "whole list.",
        ),
    ] = Sort.NEWEST,
    limit: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Maximum number of artifacts; 0 lists all.")
    ] = 50,
    after: Annotated[
        str, typer.Option(help="Continue after this place, which the previous page printed.")
    ] = "",
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """List the artifacts of a namespace.

    The second line of an artifact shows the device type for which it was compiled, and who
    published it. `graphstash show` and `graphstash explain` accept the beginning of a fingerprint.
    """
    config = load_config(url=url, namespace=namespace)
    if after and sort not in _ORDERS:
        fail(
            f"--after needs --sort {' or '.join(_ORDERS)}, not {sort}: raise --limit instead",
            status=ExitStatus.USAGE,
        )
    chosen = {
        "order": _ORDERS.get(sort, ListOrder.FINGERPRINT),
        "kind": kind,
        "device_type": device_type,
        "label": label,
        "after": after,
    }
    try:
        query = ArtifactQuery.model_validate(chosen)
    except ValueError as error:
        fail(option_error(error), status=ExitStatus.USAGE)
    from graphstash._http.client import ServerClient  # slow to import, as are the others below

    with closing(ServerClient(config)) as server:
        found, following = _list(server, query, sort=sort, limit=limit)
    if as_json:
        print_json(
            {
                "namespace": config.namespace,
                "artifacts": [each.model_dump(mode="json") for each in found],
                "next": following,
            }
        )
        return
    if not found:
        say(f"no such artifacts in the namespace {config.namespace}")
        return
    _print_list(found)
    if following is not None:
        err.print(f"more: --after {shlex.quote(shown(following))}", markup=False, soft_wrap=True)


def show(
    artifact: Annotated[
        str,
        typer.Argument(
            help="The beginning of a fingerprint, or a key: `kind/device type/fingerprint`."
        ),
    ],
    *,
    url: Url = None,
    namespace: NamespaceOption = None,
    as_json: Json = False,
) -> None:
    """Show everything about one artifact: parts, label, signature, hits.

    The command checks the signature in the server's metadata, unless GRAPHSTASH_SIGNATURES is off.
    A job checks the bytes when it fetches them.
    """
    from graphstash._artifacts.stash import Stash
    from graphstash._http.client import ServerClient

    config = load_config(url=url, namespace=namespace)
    with closing(ServerClient(config)) as server:
        found = find_one(server, artifact)
    trust = _trust_of(config, found)
    with Stash(config) as stash:
        is_here = stash.standing.has(config.namespace, found.key)
    if as_json:
        known = found.model_dump(mode="json")
        print_json(
            {"namespace": config.namespace, **known, "trust": trust, "is_on_this_host": is_here}
        )
        return
    _print_one(config.namespace, found, trust, is_here=is_here)


def forget(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="The beginning of a fingerprint, or a key: `kind/device type/fingerprint`.",
        ),
    ],
    *,
    as_json: Json = False,
) -> None:
    """Remove an artifact from this host's disk: all copies, of every namespace and server.

    This command contacts no server. The server keeps the artifact, so the next job fetches it again
    unless an administrator deletes or withholds it. Jobs that have loaded it keep using it.
    """
    from graphstash._artifacts.local_tier import OWN
    from graphstash._artifacts.stash import Stash

    config = load_config()
    key, prefix = _key_or_prefix(artifact)
    with Stash(config) as stash:
        if stash.local.is_private:
            fail(stash.local.troubles[0].detail if stash.local.troubles else _NOTHING_KEPT)
        found = [copy for copy in stash.local.copies(prefix) if key is None or copy.key == key]
        if len({copy.key for copy in found}) > 1:
            several = ", ".join(sorted({str(copy.key) for copy in found})[:3])
            fail(f"several artifacts begin with {prefix!r}: {several}; give more characters")
        for copy in found:
            try:
                copy.path.unlink(missing_ok=True)
            except OSError as error:
                fail(
                    f"cannot remove {copy.key} of the namespace {copy.namespace}: {error.strerror}"
                )
    if as_json:
        print_json(
            {
                "removed": [
                    {
                        "key": str(copy.key),
                        "namespace": copy.namespace,
                        "is_own": copy.origin == OWN,
                    }
                    for copy in found
                ]
            }
        )
        return
    if not found:
        fail(f"this host's disk has no artifact that begins with {prefix!r}")
    for copy in found:
        where = "which no server has stored" if copy.origin == OWN else "which a server may have"
        say(f"removed {copy.key} of the namespace {copy.namespace}, {where}")
    say(
        "Unchanged: servers, other hosts, packs that contain it, and processes that have loaded "
        "it. A server continues to serve it until an administrator withholds or deletes it there."
    )


def find_one(server: "ServerClient", text: str) -> ListedArtifact:
    """Return the only artifact with this key or prefix, with details, or end the command."""
    key, prefix = _key_or_prefix(text)
    query = ArtifactQuery(fingerprint=prefix, details=True, limit=3)
    found = [each for each in server.every_artifact(query) if key is None or each.key == key]
    if not found:
        fail(
            f"no artifact of the namespace {server.config.namespace} begins with {prefix!r}: "
            "`graphstash ls` lists them, --namespace chooses another namespace"
        )
    if len(found) > 1:
        several = ", ".join(str(each.key) for each in found[:3])
        fail(f"{len(found)} artifacts begin with {prefix!r}: {several}; give more characters")
    return found[0]


def is_prefix(text: str) -> bool:
    """Return whether a text is a fingerprint, or enough of the beginning of one."""
    return _MIN_PREFIX <= len(text) <= 64 and not set(text) - set("0123456789abcdef")


def _key_or_prefix(text: str) -> tuple[ArtifactKey | None, str]:
    """Return an argument's key, if it is one, and its fingerprint or prefix, or end the command."""
    if "/" in text:
        try:
            key = ArtifactKey.parse(*text.split("/")[-3:])
        except (InvalidValueError, TypeError):
            fail(
                f"{shown(text)!r} is not a key: write kind/device type/fingerprint, or the "
                "beginning of a fingerprint",
                status=ExitStatus.USAGE,
            )
        return key, key.fingerprint
    if not is_prefix(text):
        fail(
            f"{shown(text)!r} is not a fingerprint: write its first {_MIN_PREFIX} to 64 "
            "characters, 0-9 and a-f; `graphstash ls` shows them",
            status=ExitStatus.USAGE,
        )
    return None, text


def _list(
    server: "ServerClient", query: ArtifactQuery, *, sort: Sort, limit: int
) -> tuple[list[ListedArtifact], str | None]:
    if sort not in _ORDERS:
        return _sort_here(server, query, sort=sort, limit=limit), None
    found: list[ListedArtifact] = []
    following: str | None = query.after
    while following is not None and (not limit or len(found) < limit):
        most = min(limit - len(found), 500) if limit else 500
        try:
            page = server.list_artifacts(
                query.model_copy(update={"after": following, "limit": most})
            )
        except RefusedError as error:  # by a server of an earlier release
            if sort is not Sort.SIZE or following or error.code is not ErrorCode.INVALID_REQUEST:
                raise
            return _sort_here(server, query, sort=sort, limit=limit), None
        found += page.artifacts
        following = None if page.next == following else page.next
    return found[: limit or None], following


def _sort_here(
    server: "ServerClient", query: ArtifactQuery, *, sort: Sort, limit: int
) -> list[ListedArtifact]:
    with count_progress() as progress:
        whole = query.model_copy(update={"order": ListOrder.FINGERPRINT, "limit": 500})
        every = progress.track(server.every_artifact(whole), description="reading the list")
        if not limit:
            return sorted(every, key=_SORT_KEYS[sort], reverse=True)
        return heapq.nlargest(limit, every, key=_SORT_KEYS[sort])


def _print_list(found: list[ListedArtifact]) -> None:
    lines: list[str] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for each in found:
            metadata = each.metadata
            producer = f", by {shown(metadata.producer)}" if metadata and metadata.producer else ""
            lines.append(f"{' ' * (_SHOWN_FINGERPRINT + 2)}on {each.key.device_type}{producer}")
            yield (
                each.key.fingerprint[:_SHOWN_FINGERPRINT],
                each.key.kind.value,
                format_bytes(each.size_bytes),
                f"{_seconds(each):.1f} s",
                f"{each.hits}",
                format_age(each.created_at),
                shown(each.label, most=128) or "-",
            )

    headings = ("fingerprint", "kind", ">size", ">compile", ">hits", ">age", "label")
    print_table(headings, list(rows()), flexible=6, below=lines)


def _print_one(
    namespace: Namespace, found: ListedArtifact, trust: dict[str, Any], *, is_here: bool
) -> None:
    metadata = found.metadata
    lines = {
        "label": shown(found.label, most=128) or "none",
        "namespace": namespace,
        "kind": found.key.kind.value,
        "device type": found.key.device_type,
        "fingerprint": found.key.fingerprint,
        "digest": found.digest,
        "size": f"{format_bytes(found.size_bytes)} ({found.size_bytes} bytes)",
        "unpacked": format_bytes(metadata.raw_size_bytes) if metadata else "unknown",
        "compile time": format_seconds(_seconds(found)) if metadata else "unknown",
        "toolchain": (shown(metadata.toolchain, most=256) if metadata else "") or "unknown",
        "made by": (shown(metadata.producer, most=128) if metadata else "") or "unknown",
        "stored": f"{found.created_at:%Y-%m-%d %H:%M} UTC ({format_age(found.created_at)} ago)",
        "last used": f"{found.last_used_at:%Y-%m-%d %H:%M} UTC",
        "hits": f"{found.hits}",
        "signature": trust["text"],
        "on this host": "yes" if is_here else "no",
    }
    for name, value in lines.items():
        say(f"{name:13} {value}")
    description = found.description
    parts = description.parts if description else metadata.parts if metadata else {}
    if not parts:
        say("parts         unknown: its publisher has not described it")
    for title, is_wanted in (("the program", True), ("its environment", False)):
        chosen = {name: value for name, value in parts.items() if is_of_program(name) is is_wanted}
        if chosen:
            say(f"\n{title}", style="bold")
        for name, value in sorted(chosen.items()):
            say(f"  {shown(name)}: {shown(value, most=_SHOWN_VALUE)}")


def _trust_of(config: ClientConfig, found: ListedArtifact) -> dict[str, Any]:
    """Check an artifact's signature as this host's settings require.

    `state` is unsigned, unchecked, trusted or refused.
    """
    from graphstash._trust.policy import Signatures, SignedSubject
    from graphstash._trust.proof import Provenance

    signature = found.metadata.signature if found.metadata else None
    trust: dict[str, Any] = {"key_id": signature.key_id if signature else None}
    by = f"by key {signature.key_id}" if signature else ""
    signatures = Signatures(config, secret=lambda: None)
    name = _name_of(config, signature.key_id) if signature else ""
    if signatures.policy is SignaturePolicy.OFF:
        text = f"{by}, which this host does not check (GRAPHSTASH_SIGNATURES=off)"
        unsigned = "none, and this host requires none"
        return trust | {
            "state": "unchecked" if signature else "unsigned",
            "text": text if signature else unsigned,
        }
    raw_size = found.metadata.raw_size_bytes if found.metadata else 0
    digest = Digest.parse(found.digest, size_bytes=found.size_bytes)
    subject = SignedSubject(config.namespace, found.key, digest, raw_size)
    try:
        is_signed = signatures.check(subject, Provenance(signature=signature))
    except CacheError as error:
        return trust | {"state": "refused", "text": f"refused on this host: {error.detail}"}
    if not is_signed:
        return trust | {"state": "unsigned", "text": "none; this host accepts unsigned artifacts"}
    return trust | {"state": "trusted", "text": f"{by}{name}, trusted on this host"}


def _name_of(config: ClientConfig, key_id: str) -> str:
    if config.trusted_keys is None:
        return ""
    from graphstash._trust.trusted_keys import TrustedKeys

    trusted = TrustedKeys.read(config.trusted_keys).keys
    name = next((each.name for each in trusted if each.key_id == key_id), "")
    return f" ({shown(name)})" if name else ""


def _seconds(each: ListedArtifact) -> float:
    return each.metadata.compile_seconds if each.metadata else 0.0


def option_error(error: ValueError) -> str:
    """Return the first error of an option as one line with the value."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors(include_url=False)[0]
    name = "".join(map(str, first["loc"])).replace("_", "-")
    return f"--{name}={first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
