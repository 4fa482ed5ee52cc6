"""Explain misses: which parts of a program's key differ from the nearest stored artifact."""

import math
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic, time
from typing import Final

from graphstash._compile.stats import format_seconds
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, Reason, RefusedError
from graphstash_schema import ArtifactKey, ErrorCode, Namespace
from graphstash_schema.display import plural
from graphstash_schema.explanation import (
    PACK_PART,
    Description,
    Difference,
    ExplainResponse,
    Relative,
    Removal,
    compare,
    differing_names,
    format_difference,
    identity_of,
    name_of,
)
from graphstash_schema.names import printable

__all__ = [
    "Cause",
    "EarlierRuns",
    "Explainer",
    "brief_line",
    "cause_of",
    "causes_of",
    "format_causes",
    "label_of",
]

_MAX_ASKED = 64
_MAX_SECONDS = 10.0
_MAX_AGE_SECONDS: Final = 1e9
"""Longest age of a run that a server accepts. A run is older if its host's clock began at 1970."""
_NEW: Final = "new program"
_SHOWN_DIFFERENCES = 4
_SHOWN_LABELS = 4
_SHOWN_NAMES = 2
_NAME_CHARACTERS = 40

_MEANINGS: Final[Mapping[str, str]] = {
    Reason.BUSY: "the server was busy",
    Reason.CIRCUIT_OPEN: "the server did not answer earlier calls, so it was not asked",
    Reason.CONNECT: "the server was down or unreachable",
    Reason.FORBIDDEN: "the token does not grant this access to the namespace",
    Reason.NO_SERVER: "no server was configured",
    Reason.STORE_FULL: "the store, its disk or the namespace is full",
    Reason.TIMEOUT: "the server did not answer in time",
    Reason.UNAUTHENTICATED: "the server did not accept the token",
    Reason.UNKNOWN_KEY: "it is stored, but signed by a key that this host does not trust",
    Reason.UNSIGNED: "it is stored, but a signature is required and it has none",
    Reason.WAIT_BUDGET: "another job was compiling it, and this job stopped waiting",
}
"""Meaning of a reason, as a sentence about the server or the artifact."""

_REMOVED: Final = {
    "delete": ("it was deleted", "deleted"),
    "evict": ("it was evicted", "evicted"),
    "withhold": ("it is withheld since it was reported", "withheld"),
}
"""Effect of an action in the audit log on an artifact: as a sentence, and in brief."""


@dataclass(slots=True)
class Cause:
    """A cause of misses, and the programs that missed for it.

    Attributes:
        text: The cause as a sentence.
        brief: The cause in a few words, or "" if it is unknown or uncertain.
        labels: Labels of the programs.
        keys: Keys of the programs.
        nearest: The stored artifact that is nearest to the first program, or None.
        is_miss: Whether the cache answered that it does not have the programs.
    """

    text: str
    brief: str = ""
    is_miss: bool = True
    labels: list[str] = field(default_factory=list)
    keys: list[ArtifactKey] = field(default_factory=list)
    nearest: Relative | None = None


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """Records of earlier runs on this host.

    Attributes:
        compiled: Programs that the runs compiled, with the time and the namespace.
        unsent: By key, why the latest upload to the namespace failed, or "", and the start of its
            process in seconds since 1970.
    """

    compiled: Sequence[tuple[Description, datetime, Namespace]] = ()
    unsent: Mapping[ArtifactKey, tuple[str, float]] = field(default_factory=dict)


class Explainer:
    """Explains misses one by one.

    After the limit or the first error, it asks the server no more, and compares misses with the
    programs that earlier runs on this host compiled.

    Args:
        server: Server that finds the nearest artifacts, for at most 64 misses.
        started_at: Start of the run that missed them, in seconds since 1970. Artifacts that were
            stored later are not compared, because the run itself may have published them.
        earlier: Records of earlier runs on this host, if known.
        until: Time of `time.monotonic` after which the server is not asked.
    """

    def __init__(
        self,
        server: ServerClient,
        *,
        started_at: float,
        earlier: EarlierRuns | None = None,
        until: float = math.inf,
    ) -> None:
        self._server = server
        self._started_at = started_at
        self._earlier = earlier
        self._until = until
        self._asked = 0
        self._failure: CacheError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the server did not answer a call, so that it is not asked again."""
        return self._failure is not None

    def explain(self, description: Description, reason: str | None) -> Cause:
        """Return the cause of one miss, without its label."""
        if reason is not None:
            return Cause(_describe_reason(reason), is_miss=False)
        if self._asked == _MAX_ASKED or monotonic() > self._until:
            return Cause(
                f"not explained: a run explains at most {_MAX_ASKED} misses in {_MAX_SECONDS:g} s"
            )
        if self._failure is None:
            self._asked += 1
            try:
                age = min(max(0.0, time() - self._started_at), _MAX_AGE_SECONDS)
                answer = self._server.explain(description, min_age_seconds=age)
            except CacheError as error:
                self._failure = error
        if self._failure is not None:
            return _compare_with_earlier_runs(description, self._earlier, self._failure)
        if why := _upload_failure(self._earlier or EarlierRuns(), description.key, answer.removal):
            return Cause(f"an earlier run on this host compiled it, but its upload failed ({why})")
        cause = cause_of(answer, missed=description.key, read=self._server.config.readable)
        if PACK_PART in description.program and not answer.relatives:
            cause.text, cause.brief = "new small program: no pack of this job has it", _NEW
        return cause


def causes_of(
    server: ServerClient,
    misses: Sequence[tuple[Description, str | None]],
    *,
    started_at: float,
    earlier: EarlierRuns | None = None,
    known: Mapping[ArtifactKey, Cause] | None = None,
) -> list[Cause]:
    """Return the causes of misses, the most frequent first. A reason of None means a plain miss."""
    until = monotonic() + _MAX_SECONDS
    explainer = Explainer(server, started_at=started_at, earlier=earlier, until=until)
    causes: dict[str, Cause] = {}
    # Programs in packs last: a job has many of them, and they compile fast.
    for description, reason in sorted(misses, key=lambda miss: PACK_PART in miss[0].program):
        found = (known or {}).get(description.key) or explainer.explain(description, reason)
        cause = causes.setdefault(found.text, replace(found, labels=[], keys=[]))
        cause.labels.append(label_of(description))
        cause.keys.append(description.key)
    return sorted(causes.values(), key=lambda each: -len(each.labels))


def brief_line(
    causes: Sequence[Cause], *, missed: Container[ArtifactKey], misses: int, page: str
) -> str:
    """Return one line with the number of misses, their most frequent cause, and a link.

    Example: `missed 3: XLA_FLAGS differs -> https://cache/runs/team/...`. If only some misses
    have the cause: `missed 9: jax differs (3 of 4 explained)`. An uncertain cause is left out.
    Only keys that are `missed` count. Returns "" if there is neither a cause nor a link.
    """
    counts: Counter[str] = Counter()
    for cause in causes:
        counts[cause.brief] += sum(key in missed for key in cause.keys)
    explained = counts.total()
    del counts[""]
    counts = +counts  # without zeros
    line = f"missed {misses}"
    for brief, count in counts.most_common(1):
        line += f": {brief}"
        if count != misses:
            line += f" ({count} of {explained}{' explained' if explained != misses else ''})"
    return f"{line} -> {page}" if page else line if counts else ""


def _upload_failure(earlier: EarlierRuns, key: ArtifactKey, removal: Removal | None) -> str:
    """Return why the latest upload failed, or "" if the artifact was removed after it."""
    why, at = earlier.unsent.get(key, ("", 0.0))
    return "" if removal is not None and removal.at.timestamp() > at else why


def _describe_reason(reason: str) -> str:
    """Return a sentence about `Miss.trouble`: why the cache could not help."""
    known = _MEANINGS.get(reason.partition(":")[0])
    return f"the cache could not help ({reason})" + (f": {known}" if known else "")


def _compare_with_earlier_runs(
    missed: Description, earlier: EarlierRuns | None, failure: CacheError
) -> Cause:
    """Compare a miss with the programs that earlier runs on this host compiled."""
    why = f"the server cannot be asked ({_reason_of(failure)})"
    if earlier is None:
        return Cause(f"not explained: {why}")
    alike = [
        (
            len(differing_names(missed.parts, described.parts)),
            -at.timestamp(),
            described,
            at,
            namespace,
        )
        for described, at, namespace in earlier.compiled
        if described.key.kind == missed.key.kind
        and (described.label == missed.label or _is_same_body(described, missed))
    ]
    if not alike:
        return Cause(f"not explained: {why}, and no earlier run on this host compiled it")
    _, _, described, at, namespace = min(alike, key=lambda each: each[:2])
    differences = compare(missed.parts, described.parts, kind=missed.key.kind)
    nearest = Relative(
        key=described.key,
        namespace=namespace,
        label=described.label,
        created_at=at,
        is_same_program=_is_same_body(described, missed),
        differences=differences,
    )
    if differences:
        text = f"{_differences(differences)} (compared with earlier runs on this host: {why})"
    else:
        text = f"an earlier run on this host compiled it; {why}"
    return Cause(text, nearest=nearest)


def _reason_of(failure: CacheError) -> str:
    """Return a reason with its meaning. The server answers 404 for a namespace that the token does
    not cover.
    """
    reason = failure.reason
    if isinstance(failure, RefusedError) and failure.code is ErrorCode.NOT_FOUND:
        reason = Reason.FORBIDDEN
    return f"{reason}: {_MEANINGS[reason]}" if reason in _MEANINGS else str(reason)


def _is_same_body(one: Description, other: Description) -> bool:
    identity = identity_of(one.program)
    return bool(identity) and identity == identity_of(other.program)


def format_causes(causes: Sequence[Cause]) -> list[str]:
    """Return the causes as lines for a terminal."""
    lines = []
    for cause in causes:
        count = len(cause.labels)
        counted = plural(count, "miss") if cause.is_miss else f"{count} compiled"
        lines.append(f"{counted}: {cause.text}")
        labels = list(dict.fromkeys(cause.labels))
        more = len(labels) - _SHOWN_LABELS
        shown = ", ".join(labels[:_SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"    {shown}")
        if cause.nearest is not None:
            lines.append(f"    nearest: {_describe_origin(cause.nearest)}")
    return lines


def cause_of(
    answer: ExplainResponse,
    *,
    missed: ArtifactKey | None = None,
    read: Sequence[Namespace] = (),
) -> Cause:
    """Return the server's explanation as a cause, without labels.

    Name `missed` if an artifact with another key may have the description of the missed program.
    """
    nearest = answer.relatives[0] if answer.relatives else None
    if answer.removal is not None:
        return _cause_of_removal(answer.removal)
    if nearest is None:
        unknown = ""
        if answer.undescribed:
            unknown = f" ({plural(answer.undescribed, 'artifact')} here without a description)"
        where = " in the namespaces that were looked through, which are not all"
        partly = where if answer.is_partial else ""
        text = f"new program: nothing like it is stored{partly}{unknown}"
        return Cause(text, "" if partly or unknown else _NEW)
    if not nearest.differences:
        return _cause_of_equal(nearest, missed or nearest.key, read)
    return Cause(_differences(nearest.differences), _brief_of(nearest.differences), nearest=nearest)


def _cause_of_equal(nearest: Relative, missed: ArtifactKey, read: Sequence[Namespace]) -> Cause:
    """Return why an artifact with the same description was not used."""
    if missed.device_type != nearest.key.device_type:
        text = f"device type: {missed.device_type} here, {nearest.key.device_type} there"
        return Cause(text, "device type differs", nearest=nearest)
    if missed != nearest.key:
        return Cause("another key, though its description is the same", nearest=nearest)
    stored = f"stored in the namespace {nearest.namespace}, "
    if nearest.namespace in read:
        return Cause(f"it is {stored}but was not found", nearest=nearest)
    return Cause(f"it is {stored}which was not read", f"{stored}not read", nearest=nearest)


def _cause_of_removal(removal: Removal) -> Cause:
    """Return the cause for a removed artifact: the time, and who removed it if the server says."""
    done, brief = _REMOVED.get(removal.action, (printable(removal.action, most=32), ""))
    if removal.action == "evict" and removal.reason == "retention":
        done = "it has expired: evicted"
    reason = f": {printable(removal.reason, most=80)}" if removal.reason else ""
    actor = f" by {printable(removal.actor, most=80)}" if removal.actor else ""
    at = f"{removal.at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return Cause(f"{done} on {at}{actor}{reason}", brief)


def _differences(differences: Sequence[Difference]) -> str:
    shown = [format_difference(each) for each in differences[:_SHOWN_DIFFERENCES]]
    more = len(differences) - _SHOWN_DIFFERENCES
    if more > 0:
        shown.append(f"{more} more")
    return "; ".join(dict.fromkeys(shown))


def _brief_of(differences: Sequence[Difference]) -> str:
    """Return which parts differ, or "" if only the compiler can read them."""
    names = [name for name in map(name_of, differences) if name]
    shown = [printable(name, most=_NAME_CHARACTERS) for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"{len(names) - _SHOWN_NAMES} more")
    if len(shown) > 1:
        return f"{', '.join(shown[:-1])} and {shown[-1]} differ"
    # Names of variables are singular: XLA_FLAGS.
    return "".join(f"{name} differ{'' if re.search('[a-z]s$', name) else 's'}" for name in shown)


def _describe_origin(nearest: Relative) -> str:
    made = f" by {printable(nearest.producer, most=64)}" if nearest.producer else ""
    age = format_seconds(max(0.0, (datetime.now(UTC) - nearest.created_at).total_seconds()))
    name = printable(nearest.label, most=80) or str(nearest.key)[:80]
    return f"{name} in {nearest.namespace}, made{made} {age} ago"


def label_of(description: Description) -> str:
    """Return what a user calls a program, or else its kind and fingerprint."""
    return printable(description.label, most=80) or description.key.short
