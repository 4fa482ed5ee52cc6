"""The lattice of tilings of a matrix multiplication.

    C (m x n) = A (m x k) B (k x n)

Each of the three loops is split into nested loops: by default 4 for m, 2 for k and 4 for n, so that
m = m_0 m_1 m_2 m_3, and so on. A move doubles one factor and halves another of the same loop, which
gives 12 + 2 + 12 = 26 moves. All factors except the outermost are powers of two. (Zhang et al.,
"Compiler-Level Matrix Multiplication Optimization for Deep Learning", arXiv 1909.10616, 2019.)
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from graphstash.tuning.space import Configuration, SpaceError, Value
from graphstash.tuning.spaces.tree import TreeSpace

__all__ = ["GemmSpace"]

MAX_DIMENSION: Final = 2**40
"""Maximum m, k or n. Larger matrices do not fit into any memory."""

MAX_FACTORS: Final = 16
"""Maximum number of factors of one loop."""


class GemmSpace(TreeSpace):
    """Every way to split the three loops of a matrix multiplication by powers of two.

    The odd part of a dimension stays in its outermost factor: 768 = 3 * 256 has as many splits as
    256, and an odd dimension has one. For more splits, pad the matrix, for example to a multiple of
    64.

    Args:
        m: rows of the first matrix, and of the result.
        k: columns of the first matrix, rows of the second.
        n: columns of the second matrix, and of the result.
        factors: number of nested loops for each of m, k and n.

    Raises:
        SpaceError: a dimension is not from 1 to 2**40, or a number of factors not from 1 to 16.
    """

    def __init__(
        self, m: int, k: int, n: int, *, factors: tuple[int, int, int] = (4, 2, 4)
    ) -> None:
        dimensions = (m, k, n)
        for name, length in zip("mkn", dimensions, strict=True):
            if type(length) is not int or not 1 <= length <= MAX_DIMENSION:
                raise SpaceError(f"{name} is {length!r}: it must be from 1 to {MAX_DIMENSION}")
        if len(factors) != len(dimensions) or not all(
            type(count) is int and 1 <= count <= MAX_FACTORS for count in factors
        ):
            raise SpaceError(
                f"factors is {factors!r}: it must be three numbers from 1 to {MAX_FACTORS}, "
                "for m, k and n"
            )
        self.dimensions = dimensions
        self.factors = tuple(factors)
        self._powers = [(length & -length).bit_length() - 1 for length in dimensions]
        self._odd = [
            length >> power for length, power in zip(dimensions, self._powers, strict=True)
        ]
        self._indices = [(axis, i) for axis in range(3) for i in range(factors[axis])]
        self.names = tuple(f"{'mkn'[axis]}_{i}" for axis, i in self._indices)
        self.values = tuple(
            tuple((self._odd[axis] if i == 0 else 1) << e for e in range(self._powers[axis] + 1))
            for axis, i in self._indices
        )
        numbered = list(enumerate(self._indices))
        self._moves = [
            (i, j)
            for i, (axis, _) in numbered
            for j, (other, _) in numbered
            if i != j and axis == other
        ]
        self.moves = len(self._moves)

    @property
    def start(self) -> Configuration:
        """The untiled configuration: all inner loops have one iteration."""
        return tuple(self.dimensions[axis] if i == 0 else 1 for axis, i in self._indices)

    def __contains__(self, configuration: object) -> bool:
        return self._fits(configuration) and all(
            math.prod(self._factors_of(configuration, axis)) == self.dimensions[axis]
            for axis in range(3)
        )

    def _factors_of(self, configuration: Configuration, axis: int) -> list[int]:
        first = sum(self.factors[:axis])
        return [int(each) for each in configuration[first : first + self.factors[axis]]]

    def continuations(self, prefix: Configuration) -> Mapping[Value, int]:
        """Return the next parameter's values, with the number of configurations for each."""
        axis, i = self._indices[len(prefix)]
        used = math.prod(self._factors_of(prefix, axis))
        if i:
            used //= self._odd[axis]
        left = self._powers[axis] - (used.bit_length() - 1)
        loops = self.factors[axis] - i - 1
        others = math.prod(
            math.comb(self._powers[later] + self.factors[later] - 1, self.factors[later] - 1)
            for later in range(axis + 1, 3)
        )
        values = self.values[len(prefix)]
        if loops == 0:
            return {values[left]: others}
        return {
            values[e]: others * math.comb(left - e + loops - 1, loops - 1) for e in range(left + 1)
        }

    def moved(self, configuration: Configuration, move: int) -> Configuration | None:
        """Double one factor and halve another. Return None if the other is odd."""
        doubled, halved = self._moves[move]
        value = int(configuration[halved])
        if value % 2:
            return None
        changed = list(configuration)
        changed[halved] = value // 2
        changed[doubled] = int(configuration[doubled]) * 2
        return tuple(changed)

    def describe(self) -> dict[str, Any]:
        """Return the space as a value for JSON, see `from_description`."""
        m, k, n = self.dimensions
        return {"space": "gemm", "m": m, "k": k, "n": n, "factors": list(self.factors)}
