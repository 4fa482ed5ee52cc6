"""Explanations: what an artifact was compiled from, and how a missed one differs from it.

A hook names the parts of every fingerprint. If a part is a key that only the compiler understands,
the hook adds readable parts. Parts of the program (its text, its inputs) differ from graph to
graph. Parts of the environment (versions, flags, the CPU) are the same for all graphs of a job.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from pydantic import AwareDatetime, Field

from graphstash_schema.key import MAX_PARTS, ArtifactKey
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE, Namespace, line_of, printable
from graphstash_schema.protocol import MAX_DESCRIPTIONS

__all__ = [
    "MAX_LABEL_CHARACTERS",
    "MAX_PARTS_CHARACTERS",
    "DescribeRequest",
    "Description",
    "Difference",
    "ExplainResponse",
    "Relative",
    "bounded_parts",
    "compare",
    "described",
    "digest_of_parts",
    "identity_of",
    "is_of_program",
    "words",
]

MAX_LABEL_CHARACTERS: Final = 128
"""Maximum length of a program's label."""

MAX_PARTS_CHARACTERS: Final = 8192
"""Maximum characters of a program's parts, and of its environment's parts, names included."""

_OPAQUE: Final = re.compile(r"graph|name|.*_key")
"""Names of parts that only the compiler can read. They cover the program and much of its
environment, so a difference in one is uninformative if another part differs."""

_PROGRAM: Final = frozenset(
    {
        *(
            "command",
            "compile_options",
            "constants",
            "format",
            "group",
            "header",
            "inputs",
            "options",
        ),
        *("program", "signature", "values", "variant"),
    }
)

_TEXT: Final = frozenset({"program", "command"})

_DIGEST: Final = re.compile(r"(sha256:)?[0-9a-f]{64}|[a-z2-7]{51,52}")
"""A digest in hex, or in base 32 as torch writes it."""

_SHOWN: Final = 80
_SHOWN_WORDS: Final = 8

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
PartName = Annotated[str, Field(pattern=f"^{_NAME}$")]
Parts = Annotated[dict[PartName, str], Field(default_factory=dict, max_length=MAX_PARTS)]


def is_of_program(name: str) -> bool:
    """Return whether a part describes one program, not the environment of the whole job."""
    return name in _PROGRAM or _is_opaque(name)


def identity_of(parts: Mapping[str, str]) -> str:
    """Return the digest of a program's text, which does not depend on the environment.

    Returns "" if the text is unknown.
    """
    program = parts.get("program") or parts.get("command", "")
    return hashlib.sha256(program.encode("utf-8", "replace")).hexdigest() if program else ""


def bounded_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """Replace the largest values by their digests until the parts fit `MAX_PARTS_CHARACTERS`.

    Drops parts with malformed names, and parts for which there is no room even as digests.
    """
    fitting = {
        name: value.encode("utf-8", "replace").decode()
        for name, value in sorted(parts.items())
        if re.fullmatch(_NAME, name)
    }
    while _size(fitting) > MAX_PARTS_CHARACTERS:
        largest = max(fitting, key=lambda name: len(fitting[name]))
        if len(fitting[largest]) <= len(_digest("")):
            del fitting[largest]
        else:
            fitting[largest] = _digest(fitting[largest])
    return fitting


def digest_of_parts(parts: Mapping[str, str]) -> str:
    """Return the identifier of a set of parts: 64 hex digits."""
    text = json.dumps(sorted(parts.items()), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Description(RequestModel):
    """What an artifact was compiled from, or what a missed artifact would be compiled from."""

    key: ArtifactKey
    label: str = Field(
        default="",
        max_length=MAX_LABEL_CHARACTERS,
        pattern=LINE,
        description='what its user calls the program, e.g. "jit(train_step)"; never trusted',
    )
    program: Parts
    environment: Parts

    @property
    def is_bounded(self) -> bool:
        """Whether the parts fit `MAX_PARTS_CHARACTERS`."""
        return max(_size(self.program), _size(self.environment)) <= MAX_PARTS_CHARACTERS

    @property
    def parts(self) -> dict[str, str]:
        """All parts of the program and its environment."""
        return {**self.environment, **self.program}


def described(key: ArtifactKey, label: str, parts: Mapping[str, str]) -> Description:
    """Return a description within the limits, from parts of any size."""
    return Description(
        key=key,
        label=line_of(label, most=MAX_LABEL_CHARACTERS),
        program=bounded_parts({n: value for n, value in parts.items() if is_of_program(n)}),
        environment=bounded_parts({n: value for n, value in parts.items() if not is_of_program(n)}),
    )


class DescribeRequest(RequestModel):
    """Descriptions of artifacts to store."""

    artifacts: Items[Description] = Field(min_length=1, max_length=MAX_DESCRIPTIONS)


class Difference(WireModel):
    """One part that differs."""

    part: str
    here: str | None = Field(
        default=None, description="value for the missed artifact; null if it has no such part"
    )
    there: str | None = Field(
        default=None, description="value for the stored artifact; null if it has no such part"
    )


class Relative(WireModel):
    """A stored artifact that is similar to a missed one."""

    key: ArtifactKey
    namespace: Namespace
    label: str = ""
    producer: str = ""
    created_at: AwareDatetime
    is_same_program: bool = Field(description="whether the text of the program is the same")
    differences: Items[Difference] = Field(
        description="readable parts that differ; if there are none, digests and opaque keys"
    )


class ExplainResponse(WireModel):
    """The nearest artifacts of all namespaces that the caller may read, nearest first."""

    relatives: Items[Relative]
    is_partial: bool = Field(
        default=False,
        description="whether the caller may read more namespaces than the server searched",
    )
    undescribed: int = Field(
        default=0,
        description="if there are no relatives: artifacts of the namespace without a description, "
        "among the 250 that were stored first and the 250 that were stored last",
    )


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the parts that differ. For long values, return only the words that differ.

    Returns readable parts; if none differs, digests and the program's text; if none differs, opaque
    compiler keys. Each group also changes with the groups before it.
    """
    names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    digests = {
        name
        for name in names
        if all(_DIGEST.fullmatch(side.get(name, "0" * 64)) for side in (here, there))
    }
    chosen = (
        [name for name in names if name not in digests | _TEXT and not _is_opaque(name)]
        or [name for name in names if not _is_opaque(name)]
        or names
    )
    return tuple(_difference(name, here.get(name), there.get(name)) for name in chosen)


def words(difference: Difference, *, where: str = "there") -> str:
    """Return a difference as text: `XLA_FLAGS: --a=1 here, --a=2 there`."""
    name = printable(difference.part.removeprefix("env."), most=_SHOWN)
    if not difference.part.startswith("env."):
        name = name.replace("_", " ")
    if difference.part in _TEXT:
        return "the program itself changed"
    if difference.part == "graph":
        return "another graph of the same line: other operations, shapes or types"
    if _is_opaque(difference.part):
        return "the compiler's own key differs, and it does not say in what"
    if difference.here and difference.there and _DIGEST.fullmatch(difference.here):
        return f"other {name}"
    return f"{name}: {_value_text(difference.here)} here, {_value_text(difference.there)} {where}"


def _is_opaque(name: str) -> bool:
    return _OPAQUE.fullmatch(name) is not None


def _value_text(value: str | None) -> str:
    if value is None:
        return "not set"
    return printable(value, most=4 * _SHOWN) or "nothing"


def _difference(name: str, here: str | None, there: str | None) -> Difference:
    if here is None or there is None:
        shown = [None if value is None else _cut(value) for value in (here, there)]
        return Difference(part=name, here=shown[0], there=shown[1])
    if max(len(here), len(there)) <= _SHOWN:
        return Difference(part=name, here=here, there=there)
    words_here, words_there = re.split(r"[\s;]+", here), re.split(r"[\s;]+", there)
    set_here, set_there = set(words_here), set(words_there)
    only_here = [word for word in words_here if word not in set_there]
    only_there = [word for word in words_there if word not in set_here]
    if (not only_here and not only_there) or len(words_here) == 1 or len(words_there) == 1:
        start = next(at for at, (a, b) in enumerate(_aligned(here, there)) if a != b)
        start = max(0, start - _SHOWN // 4)
        return Difference(part=name, here=_window(here, start), there=_window(there, start))
    return Difference(part=name, here=_first_words(only_here), there=_first_words(only_there))


def _aligned(here: str, there: str) -> Iterable[tuple[str | None, str | None]]:
    longest = max(len(here), len(there))
    return (
        (here[at] if at < len(here) else None, there[at] if at < len(there) else None)
        for at in range(longest)
    )


def _window(value: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"


def _first_words(differing: list[str]) -> str:
    shown = " ".join(differing[:_SHOWN_WORDS])
    more = len(differing) - _SHOWN_WORDS
    return _cut(shown, most=4 * _SHOWN) + (f" and {more} more" if more > 0 else "")


def _cut(value: str, *, most: int = 2 * _SHOWN) -> str:
    return value if len(value) <= most else f"{value[:most]}..."


def _size(parts: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in parts.items())


def _digest(value: str) -> str:
    return "sha256:" + hashlib.sha256(value.encode()).hexdigest()
