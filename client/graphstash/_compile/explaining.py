"""Explain misses: which parts of a program's key differ from the nearest stored artifact."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time

from graphstash._compile.stats import format_seconds, plural
from graphstash._http.client import ServerClient
from graphstash_schema import ArtifactKey
from graphstash_schema.explanation import Description, ExplainResponse, Relative, words
from graphstash_schema.names import printable

__all__ = ["Cause", "cause_of", "causes_of", "text_of"]

_MAX_ASKED = 64
_MAX_SECONDS = 10.0
_SHOWN_DIFFERENCES = 4
_SHOWN_LABELS = 4


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


def causes_of(
    server: ServerClient,
    misses: Sequence[tuple[Description, str | None]],
    *,
    started_at: float,
) -> list[Cause]:
    """Return the causes of misses, the most frequent first.

    Args:
        server: Server that finds the nearest artifacts, for at most 64 misses and within 10 s.
        misses: Descriptions of the programs, each with the reason why the cache failed, or None if
            there was no artifact.
        started_at: Start of the run that missed them, in seconds since 1970. Artifacts that were
            stored later are not compared, because the run itself may have published them.

    Raises:
        CacheError: The server does not answer, or refuses.
    """
    causes: dict[str, Cause] = {}
    asked, until = 0, monotonic() + _MAX_SECONDS
    for description, reason in misses:
        nearest = None
        if reason is not None:
            text = f"the cache could not help ({reason})"
        elif asked == _MAX_ASKED or monotonic() > until:
            text = f"not explained: at most {_MAX_ASKED} are, within {_MAX_SECONDS:g} s"
        else:
            asked += 1
            age = max(0.0, time() - started_at)
            text, nearest = cause_of(server.explain(description, min_age_seconds=age))
        cause = causes.setdefault(text, Cause(text, nearest=nearest))
        cause.labels.append(_name(description))
        cause.keys.append(description.key)
    return sorted(causes.values(), key=lambda each: -len(each.labels))


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


def cause_of(answer: ExplainResponse) -> tuple[str, Relative | None]:
    """Return the server's explanation as a sentence, and the nearest artifact, or None."""
    if not answer.relatives:
        unknown = ""
        if answer.undescribed:
            unknown = f" ({plural(answer.undescribed, 'artifact')} here without a description)"
        where = " in the namespaces that were looked through, which are not all"
        partly = where if answer.is_partial else ""
        return f"new program: nothing like it is stored{partly}{unknown}", None
    nearest = answer.relatives[0]
    if not nearest.differences:
        return f"it is stored in the namespace {nearest.namespace}, which was not read", nearest
    shown = [words(each) for each in nearest.differences[:_SHOWN_DIFFERENCES]]
    more = len(nearest.differences) - _SHOWN_DIFFERENCES
    if more > 0:
        shown.append(f"{more} more")
    return "; ".join(dict.fromkeys(shown)), nearest


def _origin(nearest: Relative) -> str:
    made = f" by {printable(nearest.producer, most=64)}" if nearest.producer else ""
    age = format_seconds(max(0.0, (datetime.now(UTC) - nearest.created_at).total_seconds()))
    name = printable(nearest.label, most=80) or str(nearest.key)[:80]
    return f"{name} in {nearest.namespace}, made{made} {age} ago"


def _name(description: Description) -> str:
    if description.label:
        return printable(description.label, most=80)
    return f"{description.key.kind} {description.key.fingerprint[:12]}"
