"""Programs drawn at random from lists of parts.

A program chooses one part from each list. A group has one program, and others that differ from it
in one or two choices. `Drawn.meaning` is equal for two programs exactly if they must share a key.
The layout of a program's text does not affect its meaning.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Axes", "Drawn", "draw", "laid_out", "named"]

Axes = Mapping[str, Mapping[str, str]]
"""Parts by list: for each name of a list, the text of each part by its name."""

_LARGEST_GROUP = 72
"""Maximum number of programs in a group. Every two of them are a pair, so few programs make many
pairs."""


def named(*texts: str) -> dict[str, str]:
    """Return parts whose names are their texts."""
    return {each: each for each in texts}


@dataclass(frozen=True)
class Drawn:
    """A program.

    Attributes:
        parts: text by list.
        meaning: equal for all programs that must share a key.
    """

    parts: Mapping[str, str]
    meaning: str


def draw(
    axes: Axes, meaning: Callable[[dict[str, str]], object], *, pairs: int, seed: int
) -> Iterator[Drawn]:
    """Yield programs that make this number of pairs within groups.

    Args:
        axes: Lists of parts.
        meaning: Function from choices (the name of a part, by list) to their meaning.
        pairs: Minimum number of pairs.
        seed: Seed of the choices.
    """
    chance = random.Random(seed)
    group = min(_LARGEST_GROUP, math.ceil((1 + math.sqrt(1 + 8 * pairs)) / 2))
    for _ in range(math.ceil(pairs / math.comb(group, 2))):
        first = {axis: chance.choice(list(parts)) for axis, parts in axes.items()}
        for number in range(group):
            chosen = dict(first)
            for axis in chance.sample(list(axes), chance.choice((1, 1, 2)) if number else 0):
                chosen[axis] = chance.choice(list(axes[axis]))
            parts = {axis: axes[axis][part] for axis, part in chosen.items()}
            yield Drawn(parts, repr(meaning(chosen)))


def laid_out(definitions: list[str], rest: str, layout: random.Random) -> str:
    """Return the text of a program: definitions in random order, then the rest, with comments."""
    layout.shuffle(definitions)
    lines = [f"# {layout.random()}" + "\n" * layout.randrange(4)]
    for each in (*definitions, rest):
        lines += [each, "\n" * layout.randrange(3) + f"UNUSED_{layout.randrange(9)} = 1"]
    return "\n".join(lines)
