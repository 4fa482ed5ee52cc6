"""Explanations: what an artifact was compiled from, and how a missed one differs from it.

A hook names the parts of every fingerprint. If a part is a key that only the compiler understands,
the hook adds readable parts. Parts of the program (its text, its inputs) differ from graph to
graph. Parts of the environment (versions, flags, the CPU) are the same for all graphs of a job.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Annotated, Final

from pydantic import AwareDatetime, Field

from graphstash_schema.key import MAX_PARTS, ArtifactKey, ArtifactKind
from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LINE, Namespace, line_of, printable
from graphstash_schema.protocol import MAX_DESCRIPTIONS

__all__ = [
    "MAX_LABEL_CHARACTERS",
    "MAX_PARTS_CHARACTERS",
    "PACK_PART",
    "SCHEDULE_PART",
    "SPEEDUP_PART",
    "DescribeRequest",
    "Description",
    "Difference",
    "ExplainResponse",
    "Relative",
    "Removal",
    "bounded_parts",
    "compare",
    "differing_names",
    "digest_of_parts",
    "format_difference",
    "identity_of",
    "is_of_program",
    "is_reordered",
    "make_description",
    "name_of",
]

MAX_LABEL_CHARACTERS: Final = 128
"""Maximum length of a program's label."""

MAX_PARTS_CHARACTERS: Final = 8192
"""Maximum characters of the names and values of a program's parts. Its environment's parts have a
separate limit of the same size."""

_OPAQUE: Final = re.compile(r"graph|name|.*_key")
"""Names of parts that only the compiler can read. They cover the program and much of its
environment, so a difference in one is uninformative if another part differs."""

_ADDED: Final = frozenset(
    {
        *("attrs", "compiler_options", "donated", "function", "function_key", "globals", "layout"),
        *("line", "operations", "precision"),
    }
)
_SETTING: Final = "setting."
"""Prefix of parts that earlier releases do not send. Nor do they send the parts in `_ADDED`, or
"constants" for jax. If only one of two descriptions has one of these parts or of `_HIDDEN`, the
part does not count as different."""

PACK_PART: Final = "pack"
"""Part of the description of a program in a pack: the label of the pack."""

SCHEDULE_PART: Final = "schedule"
"""Part of the description of a tuned kernel: its best configuration, for display."""

SPEEDUP_PART: Final = "speedup"
"""Part of the description of a tuned kernel: the cost of the default configuration, divided by that
of the best one."""

_HIDDEN: Final = frozenset({PACK_PART, SCHEDULE_PART, SPEEDUP_PART, "script"})
"""Parts that are in no key. They are never a cause, but make artifacts of one script nearer."""

_PROGRAM: Final = (
    _ADDED
    | _HIDDEN
    | {
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
"""Parts that contain the text of the program."""

_DEPENDENCIES: Final = frozenset({"values"})
"""Parts that are too long to read, and often differ because another part of the program does."""

_LISTS: Final = frozenset(
    {
        *("attrs", "compiler_options", "constants", "globals", "inputs", "layout", "operations"),
        *("options", "settings", "signature", "target"),
    }
)
"""Parts whose values are lists, of which only the items that differ are shown."""

_STRUCTURE: Final = "structure"
"""Name by which `compare` reports a difference between texts with the same operations."""

_COUNTED: Final = frozenset({ArtifactKind.JAX, ArtifactKind.INDUCTOR})
"""Kinds whose part `operations` counts every operation that computes."""

_CHANGED: Final = "the program itself changed"

_SENTENCES: Final = {
    **dict.fromkeys(_TEXT, _CHANGED),
    "graph": "another graph of the same line: other operations, shapes or types",
    _STRUCTURE: f"{_CHANGED}: the same operations in another order, or with other operands, "
    "shapes, axes, sharding or attributes",
}
"""Sentences about parts whose values no reader understands."""

_NAMES: Final = {
    "donated": "donated inputs (donate_argnums)",
    "function": "name of the function",
    "globals": "values of globals",
    "layout": "layout of the inputs",
    "line": "line of the function",
    _STRUCTURE: "structure of the operations",
}
"""Names of parts in sentences, if they differ from the part's own name."""

_CONSEQUENCES: Final = {
    "group": "function",
    "matmul_precision": f"{_SETTING}mat_mul_precision",
    "precision": f"{_SETTING}jax_default_matmul_precision",
}
"""Parts that follow from another part (value). If both differ, only the other part is shown."""

_DIGEST: Final = re.compile(r"(sha256:)?[0-9a-f]{64}|[a-z2-7]{51,52}")
"""A digest in hex, or in base 32 as torch writes it."""

_SWITCH: Final = re.compile(r"^ambient\._?(?:get_|is_)?")
"""Prefix of the name of a switch of torch, in the settings that the hook of inductor sends."""

_IGNORED_LINE: Final = re.compile(r"aot_config=|$")
"""In the settings of torch's hook: an empty line, or a setting that follows from the inputs."""

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
    """The inputs from which an artifact was compiled, or from which a missed one would be."""

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


def make_description(key: ArtifactKey, label: str, parts: Mapping[str, str]) -> Description:
    """Make a description within the limits from parts of any size."""
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
        description="readable parts that differ; if there are none, digests that differ; if there "
        "are none, keys that only the compiler can read"
    )


class Removal(WireModel):
    """The last removal of an artifact from a namespace."""

    action: str = Field(description="as in the audit log: `evict`, `delete` or `withhold`")
    at: AwareDatetime
    actor: str = Field(
        default="",
        description="who, as in the audit log; empty unless the caller administers the namespace",
    )
    reason: str = Field(
        default="",
        description="such as `retention` or `corrupt`; empty unless the caller administers the "
        "namespace",
    )


class ExplainResponse(WireModel):
    """The nearest artifacts of all namespaces that the caller may read, nearest first."""

    relatives: Items[Relative]
    removal: Removal | None = Field(
        default=None,
        description="why the run missed the artifact: its last removal from the namespace. Ignores "
        "its first upload or release after the start of the run, and later changes. Null if it was "
        "uploaded or released between the removal and the start, or if the removal is not among "
        "the latest 4,000 changes of the namespace",
    )
    is_partial: bool = Field(
        default=False,
        description="whether the caller may read more namespaces than the server searched",
    )
    undescribed: int = Field(
        default=0,
        description="number of artifacts without a description among the 250 oldest and the 250 "
        "newest that the namespace had before the run; 0 if an artifact with the same key, the "
        "same program or a similar label was found",
    )


def differing_names(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return the names of all parts that differ, including opaque keys and digests."""
    return [
        name
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
        and ((name in here and name in there) or not _is_added(name))
        and not (name == "settings" and _split(here.get(name, "")) == _split(there.get(name, "")))
    ]


def compare(
    here: Mapping[str, str], there: Mapping[str, str], *, kind: ArtifactKind | None = None
) -> tuple[Difference, ...]:
    """Return the parts that differ, those of the environment first. For long values and lists,
    return only the words that differ.

    Returns the first of these groups with a difference: readable parts, `values`, digests, opaque
    keys. A difference in one group usually changes later groups, which then explain nothing more.
    The program's text counts as readable, unless another part shows what changed in it. Constants
    that only one side has belong to its operations, so operations alone explain the difference.
    """
    names = [name for name in differing_names(here, there) if name not in _HIDDEN]
    digests = {
        name
        for name in names
        if all(_DIGEST.fullmatch(side.get(name, "0" * 64)) for side in (here, there))
    }
    hidden = digests | _TEXT | _DEPENDENCIES
    readable = [name for name in names if name not in hidden and not _is_opaque(name)]
    if not any(_tells_of_program(name) for name in readable):
        readable += [name for name in names if name in _TEXT]
    readable = readable or [name for name in names if name in _DEPENDENCIES]
    chosen = readable or [name for name in names if not _is_opaque(name)] or names
    shown = [name for name in chosen if _CONSEQUENCES.get(name) not in names]
    shown.sort(key=lambda name: (is_of_program(name), not name.startswith(_SETTING), name))
    found = [_difference(name, here.get(name), there.get(name)) for name in shown]
    if "operations" in shown:
        return tuple(each for each in found if not _is_one_sided(each, "constants"))
    operations = here.get("operations")
    if kind in _COUNTED and operations and operations == there.get("operations"):
        return tuple(
            each.model_copy(update={"part": _STRUCTURE}) if each.part in _TEXT else each
            for each in found
        )
    return tuple(found)


def name_of(difference: Difference) -> str:
    """Return the name of a part for sentences, or "" if only the compiler can read the part."""
    if _is_opaque(difference.part):
        return ""
    name = printable(re.sub(r"^(env|setting)\.", "", difference.part), most=_SHOWN)
    if difference.part.startswith(("env.", _SETTING)):
        return name
    return _NAMES.get(name, name.replace("_", " "))


def format_difference(difference: Difference) -> str:
    """Return a difference as text: `XLA_FLAGS: --a=1 here, --a=2 there`."""
    name = name_of(difference)
    if difference.part in _DEPENDENCIES:
        return f"other {name} that the program reads from its surroundings"
    if difference.part in _SENTENCES:
        return _SENTENCES[difference.part]
    if _is_opaque(difference.part):
        return "the compiler's own key differs, and it does not say in what"
    if difference.here and difference.there and _DIGEST.fullmatch(difference.here):
        return f"other {name}"
    if difference.part == "inputs" and _only_results(difference):
        name = "results"
    elif is_reordered(difference):
        name = f"other order of {name}"
    return f"{name}: {_value_text(difference.here)} here, {_value_text(difference.there)} there"


def is_reordered(difference: Difference) -> bool:
    """Return whether the part has the same words in another order."""
    if difference.here is None or difference.there is None:
        return False
    return sorted(difference.here.split()) == sorted(difference.there.split())


def _only_results(difference: Difference) -> bool:
    return all((side or "->").startswith("->") for side in (difference.here, difference.there))


def _is_one_sided(difference: Difference, part: str) -> bool:
    return difference.part == part and not (difference.here and difference.there)


def _is_added(name: str) -> bool:
    return name in _ADDED | _HIDDEN or name == "constants" or name.startswith(_SETTING)


def _tells_of_program(name: str) -> bool:
    """Return whether a difference in this part says what changed in the program's text."""
    return (
        name in _PROGRAM and name not in {"function", "line", "variant"} | _HIDDEN
    ) or name.startswith(_SETTING)


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
    words_here, words_there = _split(here), _split(there)
    is_list = name in _LISTS or all(word.startswith("-") for word in (*words_here, *words_there))
    if max(len(here), len(there)) <= _SHOWN and not is_list:
        return Difference(part=name, here=here, there=there)
    only_here, only_there = _differing_words(words_here, words_there)
    if is_list and (only_here or only_there):
        return Difference(part=name, here=_first_words(only_here), there=_first_words(only_there))
    if max(len(here), len(there)) <= _SHOWN:
        return Difference(part=name, here=here, there=there)
    if (not only_here and not only_there) or len(words_here) == 1 or len(words_there) == 1:
        start = next(at for at, (a, b) in enumerate(zip_longest(here, there)) if a != b)
        start = max(0, start - _SHOWN // 4)
        return Difference(part=name, here=_window(here, start), there=_window(there, start))
    return Difference(part=name, here=_first_words(only_here), there=_first_words(only_there))


def _split(value: str) -> list[str]:
    """Split several lines at their ends, and one line at blanks and semicolons outside of brackets.

    Removes brackets around the whole value, as in `Options(a=1, b=2)`, and around the inputs of a
    function type, as in `(f32, f32) -> f32`. Its results become words that begin with an arrow.
    """
    if found := re.fullmatch(r"\((.*)\) -> (.*)", value, re.DOTALL):
        results = found[2].removeprefix("(").removesuffix(")")
        return [*_split(found[1]), *(f"-> {word}" for word in _split(results))]
    if (found := re.fullmatch(r"\w+\((.*)\)", value, re.DOTALL)) and _is_balanced(found[1]):
        value = found[1]
    if "\n" in value:
        return [
            _SWITCH.sub("", line) for line in value.splitlines() if not _IGNORED_LINE.match(line)
        ]
    words, start, depth = [], 0, 0
    for found in re.finditer(r"->|[(\[{<]|[)\]}>]|[\s;]+", value):
        mark = found[0]
        if mark[0] in "([{<":
            depth += 1
        elif mark[0] in ")]}>":
            depth = max(0, depth - 1)
        elif mark != "->" and not depth:
            words.append(value[start : found.start()])
            start = found.end()
    words.append(value[start:])
    return [word.removesuffix(",") for word in words if word]


def _is_balanced(value: str) -> bool:
    """Return whether no parenthesis closes before it has opened."""
    depth = 0
    for found in re.finditer(r"[()]", value):
        depth += 1 if found[0] == "(" else -1
        if depth < 0:
            return False
    return True


def _differing_words(here: list[str], there: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that only one of two lists has. If they have the same words in another
    order, return those at other places.
    """
    only_here = list((Counter(here) - Counter(there)).elements())
    only_there = list((Counter(there) - Counter(here)).elements())
    if not only_here and not only_there and len(here) == len(there):  # another order
        moved = [(one, other) for one, other in zip(here, there, strict=True) if one != other]
        return [one for one, _ in moved], [other for _, other in moved]
    return only_here, only_there


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
