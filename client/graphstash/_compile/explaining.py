"""Explain misses: which parts of a program's key differ from the nearest stored artifact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time
from typing import Final

from graphstash._compile.stats import format_seconds, plural
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, Reason
from graphstash_schema import ArtifactKey, Namespace
from graphstash_schema.explanation import (
    PACK_PART,
    Description,
    Difference,
    ExplainResponse,
    Relative,
    Removal,
    compare,
    differing,
    identity_of,
    words,
)
from graphstash_schema.names import printable

__all__ = ["Cause", "Earlier", "cause_of", "causes_of", "text_of"]

_MAX_ASKED = 64
_MAX_SECONDS = 10.0
_MAX_AGE_SECONDS: Final = 1e9
"""Longest age of a run that a server accepts. A run is older if its host's clock began at 1970."""
_SHOWN_DIFFERENCES = 4
_SHOWN_LABELS = 4

_STATES: Final[Mapping[str, str]] = {
    Reason.BUSY: "the server was busy",
    Reason.CIRCUIT_OPEN: "the server did not answer earlier calls, so it was not asked",
    Reason.CONNECT: "the server was down or unreachable",
    Reason.FORBIDDEN: "the token does not grant this",
    Reason.NO_SERVER: "no server was configured",
    Reason.TIMEOUT: "the server did not answer in time",
    Reason.UNAUTHENTICATED: "the server did not accept the token",
    Reason.UNKNOWN_KEY: "it is stored, but signed by a key that this host does not trust",
    Reason.UNSIGNED: "it is stored, but a signature is required and it has none",
    Reason.WAIT_BUDGET: "another job was compiling it, and this job stopped waiting",
}
"""What a reason says about the state of the server or the artifact."""

_REMOVED: Final = {
    "delete": "it was deleted",
    "evict": "it was evicted",
    "withhold": "it is withheld since it was reported",
}


@dataclass(slots=True)
class Cause:
    """A cause of misses, and the programs that missed for it.

    Attributes:
        text: The cause as a sentence.
        labels: Labels of the programs.
        keys: Keys of the programs.
        nearest: The stored artifact that is nearest to the first program, or None.
    """

    text: str
    labels: list[str] = field(default_factory=list)
    keys: list[ArtifactKey] = field(default_factory=list)
    nearest: Relative | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier runs left on this host.

    Attributes:
        compiled: Programs that they compiled, with the time and the namespace.
        unsent: Why the latest upload of a program to the namespace failed, or "", and the start of
            the process in seconds since 1970, by key.
    """

    compiled: Sequence[tuple[Description, datetime, Namespace]] = ()
    unsent: Mapping[ArtifactKey, tuple[str, float]] = field(default_factory=dict)


def causes_of(
    server: ServerClient,
    misses: Sequence[tuple[Description, str | None]],
    *,
    started_at: float,
    earlier: Earlier | None = None,
) -> list[Cause]:
    """Return the causes of misses, the most frequent first.

    If the server does not answer, compare with what earlier runs on this host compiled.

    Args:
        server: Server that finds the nearest artifacts, for at most 64 misses and within 10 s.
        misses: Descriptions of the programs, each with the reason why the cache failed, or None if
            there was no artifact.
        started_at: Start of the run that missed them, in seconds since 1970. Artifacts that were
            stored later are not compared, because the run itself may have published them.
        earlier: What earlier runs left on this host.
    """
    earlier = earlier or Earlier()
    causes: dict[str, Cause] = {}
    asked, until = 0, monotonic() + _MAX_SECONDS
    failure: CacheError | None = None
    # Programs in packs last: a job has many of them, and they compile fast.
    for description, reason in sorted(misses, key=lambda miss: PACK_PART in miss[0].program):
        nearest = None
        if reason is not None:
            text = _trouble(reason)
        elif asked == _MAX_ASKED or monotonic() > until:
            text = f"not explained: at most {_MAX_ASKED} are, within {_MAX_SECONDS:g} s"
        else:
            if failure is None:
                asked += 1
                try:
                    age = min(max(0.0, time() - started_at), _MAX_AGE_SECONDS)
                    answer = server.explain(description, min_age_seconds=age)
                except CacheError as error:
                    failure = error
            if failure is not None:
                text, nearest = _from_disk(description, earlier, failure)
            elif why := _unsent(earlier, description.key, answer.removal):
                text = f"an earlier run on this host compiled it, but its upload failed ({why})"
            else:
                text, nearest = cause_of(
                    answer, missed=description.key, read=server.config.readable
                )
                if PACK_PART in description.program and not answer.relatives:
                    text = "new small program: no pack of this job has it"
        cause = causes.setdefault(text, Cause(text, nearest=nearest))
        cause.labels.append(_name(description))
        cause.keys.append(description.key)
    return sorted(causes.values(), key=lambda each: -len(each.labels))


def _unsent(earlier: Earlier, key: ArtifactKey, removal: Removal | None) -> str:
    """Return why the latest upload failed, or "" if the artifact was removed after it."""
    why, at = earlier.unsent.get(key, ("", 0.0))
    return "" if removal is not None and removal.at.timestamp() > at else why


def _trouble(reason: str) -> str:
    """Return why the cache could not help as a sentence. `reason` is that of `Miss.trouble`."""
    known = _STATES.get(reason.partition(":")[0])
    return f"the cache could not help ({reason})" + (f": {known}" if known else "")


def _from_disk(
    missed: Description, earlier: Earlier, failure: CacheError
) -> tuple[str, Relative | None]:
    """Compare with what earlier runs on this host compiled."""
    why = f"the server cannot be asked ({failure.reason})"
    alike = [
        (len(differing(missed.parts, described.parts)), -at.timestamp(), described, at, namespace)
        for described, at, namespace in earlier.compiled
        if described.key.kind == missed.key.kind
        and (described.label == missed.label or _is_same_body(described, missed))
    ]
    if not alike:
        return f"not explained: {why}, and no earlier run on this host compiled it", None
    _, _, described, at, namespace = min(alike, key=lambda each: each[:2])
    differences = compare(missed.parts, described.parts)
    nearest = Relative(
        key=described.key,
        namespace=namespace,
        label=described.label,
        created_at=at,
        is_same_program=_is_same_body(described, missed),
        differences=differences,
    )
    if not differences:
        return f"an earlier run on this host compiled it; {why}", nearest
    return f"{_differences(differences)} (compared with earlier runs on this host: {why})", nearest


def _is_same_body(one: Description, other: Description) -> bool:
    identity = identity_of(one.program)
    return bool(identity) and identity == identity_of(other.program)


def text_of(causes: Sequence[Cause]) -> list[str]:
    """Return the causes as lines for a terminal."""
    lines = []
    for cause in causes:
        lines.append(f"{plural(len(cause.labels), 'miss')}: {cause.text}")
        labels = list(dict.fromkeys(cause.labels))
        more = len(labels) - _SHOWN_LABELS
        shown = ", ".join(labels[:_SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"    {shown}")
        if cause.nearest is not None:
            lines.append(f"    nearest: {_origin(cause.nearest)}")
    return lines


def cause_of(
    answer: ExplainResponse,
    *,
    missed: ArtifactKey | None = None,
    read: Sequence[Namespace] = (),
) -> tuple[str, Relative | None]:
    """Return the server's explanation as a sentence, and the nearest artifact, or None.

    Args:
        answer: The server's explanation.
        missed: Key of the missed program, if an artifact with another key may have its description.
        read: Namespaces that the job reads.
    """
    nearest = answer.relatives[0] if answer.relatives else None
    if answer.removal is not None:
        return _removed(answer.removal), None
    if nearest is None:
        unknown = ""
        if answer.undescribed:
            unknown = f" ({plural(answer.undescribed, 'artifact')} here without a description)"
        where = " in the namespaces that were looked through, which are not all"
        partly = where if answer.is_partial else ""
        return f"new program: nothing like it is stored{partly}{unknown}", None
    if not nearest.differences:
        return _alike(nearest, missed or nearest.key, read), nearest
    return _differences(nearest.differences), nearest


def _alike(nearest: Relative, missed: ArtifactKey, read: Sequence[Namespace]) -> str:
    """Return why an artifact with the same description was not used."""
    if missed.device_type != nearest.key.device_type:
        return f"device type: {missed.device_type} here, {nearest.key.device_type} there"
    if missed != nearest.key:
        return "another key, though its description is the same"
    state = "but was not found" if nearest.namespace in read else "which was not read"
    return f"it is stored in the namespace {nearest.namespace}, {state}"


def _removed(removal: Removal) -> str:
    """Return when an artifact was taken away. Say by whom if the server does."""
    done = _REMOVED.get(removal.action, printable(removal.action, most=32))
    if removal.action == "evict" and removal.reason == "retention":
        done = "it has expired: evicted"
    reason = f": {printable(removal.reason, most=80)}" if removal.reason else ""
    actor = f" by {printable(removal.actor, most=80)}" if removal.actor else ""
    return f"{done} on {removal.at.astimezone(UTC):%Y-%m-%d %H:%M} UTC{actor}{reason}"


def _differences(differences: Sequence[Difference]) -> str:
    shown = [words(each) for each in differences[:_SHOWN_DIFFERENCES]]
    more = len(differences) - _SHOWN_DIFFERENCES
    if more > 0:
        shown.append(f"{more} more")
    return "; ".join(dict.fromkeys(shown))


def _origin(nearest: Relative) -> str:
    made = f" by {printable(nearest.producer, most=64)}" if nearest.producer else ""
    age = format_seconds(max(0.0, (datetime.now(UTC) - nearest.created_at).total_seconds()))
    name = printable(nearest.label, most=80) or str(nearest.key)[:80]
    return f"{name} in {nearest.namespace}, made{made} {age} ago"


def _name(description: Description) -> str:
    if description.label:
        return printable(description.label, most=80)
    return f"{description.key.kind} {description.key.fingerprint[:12]}"
