"""An artifact's page: its metadata, the parts it was made of, its jobs, and similar artifacts."""

from dataclasses import dataclass
from typing import Any, Final

from graphstash_schema import ErrorCode, Fingerprint, Namespace, ReportReason, Scope
from graphstash_schema.explanation import Relative, format_difference, make_description
from graphstash_server.api.calls import key_of
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.pages.visitor import Visitor
from graphstash_server.reading.representation import absent
from graphstash_server.services.artifacts.catalog import ArtifactDetails
from graphstash_server.services.artifacts.explanations import MAX_NAMESPACES

__all__ = ["artifact_of"]

_MAX_DIFFERENCES: Final = 20
"""Maximum number of differences that a page spells out."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences from another artifact, in words, and how many more there are."""

    other: StoredKey
    label: str
    differences: list[str]
    more: int


async def artifact_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of the page."""
    where = await visitor.enter(visitor.request.path_params["namespace"])
    key = key_of(visitor.request)
    details = await visitor.context.catalog.find(key)
    if details is None:
        raise absent(key)
    against = visitor.request.query_params.get("against", "").strip()
    return {
        "key": key,
        "details": details,
        "entry": details.entry,
        "artifact": details.entry.artifact,
        "against": against,
        "comparison": await _comparison(visitor, details, against) if against else None,
        "may_administer": visitor.session is not None and await visitor.may(Scope.ADMIN, where),
        "reasons": [each for each in ReportReason if each.is_about_artifact],
        "relatives": [
            (relative, _in_words(relative.differences))
            for relative in await _relatives(visitor, where, details)
        ],
    }


async def _relatives(
    visitor: Visitor, where: Namespace, details: ArtifactDetails
) -> tuple[Relative, ...]:
    entry = details.entry
    if not entry.is_described:
        return ()
    others = [each for each in visitor.listed(await visitor.namespaces()) if each != where]
    description = make_description(entry.artifact.key.key, entry.label, entry.parts)
    answer = await visitor.context.explanations.explain(
        where, description, readable=[where, *others][:MAX_NAMESPACES]
    )
    return answer.relatives


async def _comparison(visitor: Visitor, details: ArtifactDetails, against: str) -> Comparison:
    """Compare with another artifact. `against` is a fingerprint of the same namespace, kind and
    device type, or `<namespace>/<kind>/<device type>/<fingerprint>`.
    """
    key = details.entry.artifact.key
    if "/" in against:
        other = StoredKey.parse_path(against)
        await visitor.enter(other.namespace)
    else:
        other = key._replace(fingerprint=Fingerprint(against))
    found = await visitor.context.catalog.find(other)
    if found is None:
        raise absent(other)
    if not found.entry.parts or not details.entry.parts:
        raise ServerError(
            ErrorCode.NOT_FOUND,
            "one of the two artifacts has no description, so they cannot be compared",
        )
    differences = details.differences(found)
    written = _in_words(differences)
    return Comparison(other, found.entry.label, written, len(differences) - len(written))


def _in_words(differences: Any) -> list[str]:
    return [format_difference(each) for each in differences[:_MAX_DIFFERENCES]]
