"""Measure matrix multiplications of TVM."""

import math
import random
from typing import Any

from graphstash.tuning.measuring import Pool
from graphstash.tuning.targets.tvm_gemm import TvmGemm

NAMES = ("m_0", "m_1", "m_2", "m_3", "k_0", "k_1", "n_0", "n_1", "n_2", "n_3")


class DoesNothing(TvmGemm):
    def build(self, configuration: Any) -> Any:
        super().build(configuration)
        return lambda: None


class MissesOneProduct(TvmGemm):
    """A target whose kernel omits the last of the k products of one element."""

    def build(self, configuration: Any) -> Any:
        kernel = super().build(configuration)

        def wrong() -> None:
            kernel()
            c = self._c.numpy().copy()
            c[3, 5] -= self._a.numpy()[3, -1] * self._b.numpy()[-1, 5]
            self._c.copyfrom(c)

        return wrong


def split(length: int, count: int, chosen: random.Random) -> list[int]:
    """Return a length as a product. Each factor of two is at a random place."""
    factors = [1] * count
    for _ in range(int(math.log2(length))):
        factors[chosen.randrange(count)] *= 2
    return factors


def measured(*, sizes: list[int], drawn: int) -> dict[str, Any]:
    """Return the measurements of each target, and the description of TVM's own.

    Args:
        sizes: m, k and n.
        drawn: number of random tilings, besides an untiled one, a flat one, and one whose factors
            are too small.
    """
    m, k, n = sizes
    chosen = random.Random(0)
    untiled = [m, 1, 1, 1, k, 1, n, 1, 1, 1]
    flat = [1, 1, 1, m, 1, k, 1, 1, 1, n]
    parts = [
        [part for size, few in ((m, 4), (k, 2), (n, 4)) for part in split(size, few, chosen)]
        for _ in range(drawn)
    ]
    too_few = [*untiled[:6], n // 2, 1, 1, 1]
    found: dict[str, Any] = {"describe": TvmGemm(*sizes).describe()}
    for target in (TvmGemm, DoesNothing, MissesOneProduct):
        tried = [untiled, flat, *parts, too_few] if target is TvmGemm else [untiled]
        with Pool(target(*sizes)) as pool:
            for values in tried:
                pool.submit(dict(zip(NAMES, values, strict=True)))
            found[target.__name__] = []
            while pool.pending:
                found[target.__name__] += [each.to_json() for each in pool.results()]
    return found
