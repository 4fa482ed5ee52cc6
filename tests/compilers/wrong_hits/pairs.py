"""Pairs of programs.

A cache that gives one program the result of another silently trains wrong models. Each pair holds
two programs of one compiler that differ in one place, and states whether their keys may be equal.
The pairs of a compiler are data in the module of its name.
"""

import enum
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "OFF_AND_ON",
    "PLACE",
    "Pair",
    "Relation",
    "all_in_one_process",
    "pair",
    "with_extended",
]

PLACE = "HERE"
"""Placeholder in the text of a pair for the difference between its programs."""

OFF_AND_ON = ("False", "True")


class Relation(enum.Enum):
    """Required relation between the keys of two programs."""

    DIFFER = "differ"
    """The keys differ, and each key is the same on every host. Otherwise a program whose key holds
    on one host only would pass. `make test` compares fewer keys on two hosts."""
    EQUAL = "equal"
    """The keys are equal: the programs compile to the same executable."""
    UNSHARED = "unshared"
    """The second program has no key, and the hook reports why."""


@dataclass(frozen=True)
class Pair:
    """Two programs and the relation of their keys.

    A program is source code in Python that asks the compiler for at least one executable.

    Attributes:
        name: the difference, in a few words; unique within a compiler.
        a: the program that publishes.
        b: the program that looks up.
        relation: relation of their keys.
        reason: for `UNSHARED`, a part of the hook's reason.
        is_extended: only `make test-all` compares the pair, and only in the version of `.venv`:
            another pair guards the same mechanism in every version.
        only_in: environment of the pair, if only this version of the compiler suits it.
        in_one_process: its programs change nothing that another program's key contains, so they
            may run after others in one process.
    """

    name: str
    a: str
    b: str
    relation: Relation = Relation.DIFFER
    reason: str = ""
    is_extended: bool = False
    in_one_process: bool = False
    only_in: str | None = None

    def __str__(self) -> str:
        """Return the name in the form of a test's name."""
        return self.name.replace(" ", "_")


def with_extended(pairs: Iterable[Pair], *names: str) -> tuple[Pair, ...]:
    """Mark the pairs with these names as extended."""
    return tuple(replace(each, is_extended=each.name in names) for each in pairs)


def all_in_one_process(pairs: Iterable[Pair], *but: str) -> tuple[Pair, ...]:
    """Mark the pairs, except those with these names, as pairs that run in one process."""
    return tuple(replace(each, in_one_process=each.name not in but) for each in pairs)


def pair(
    name: str,
    text: str,
    *values: str,
    relation: Relation = Relation.DIFFER,
    reason: str = "",
    in_one_process: bool = False,
    only_in: str | None = None,
) -> Pair:
    """Return a pair of programs with one text, in which two values replace `HERE`.

    Without values, a number differs. With one value, or without `HERE`, both programs are the same,
    on different hosts. With a reason, the second program is not shared.
    """
    relation = Relation.UNSHARED if reason else relation
    if PLACE in text and not values:
        values = ("2", "3")
    both = (*values, *values, "", "")[:2]
    first, second = (textwrap.dedent(text).replace(PLACE, value) for value in both)
    if len(values) == 2 and first == second:
        raise ValueError(f"the programs of {name!r} do not differ")
    return Pair(
        name, first, second, relation, reason, in_one_process=in_one_process, only_in=only_in
    )
