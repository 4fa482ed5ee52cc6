"""Measures matrix multiplications of TVM, and prints what came of each as JSON."""

import json
import math
import random
import sys

from graphstash.tuning.measuring import Pool
from graphstash.tuning.targets.tvm_gemm import TvmGemm

NAMES = ("m_0", "m_1", "m_2", "m_3", "k_0", "k_1", "n_0", "n_1", "n_2", "n_3")


class DoesNothing(TvmGemm):
    def build(self, configuration):
        super().build(configuration)
        return lambda: None


class MissesOneProduct(TvmGemm):
    """The last of the k products of one number of the result."""

    def build(self, configuration):
        kernel = super().build(configuration)

        def wrong():
            kernel()
            c = self._c.numpy().copy()
            c[3, 5] -= self._a.numpy()[3, -1] * self._b.numpy()[-1, 5]
            self._c.copyfrom(c)

        return wrong


def split(length, count, chosen):
    """A length as a product, each factor of two in a place of its own choice."""
    factors = [1] * count
    for _ in range(int(math.log2(length))):
        factors[chosen.randrange(count)] *= 2
    return factors


def main():
    sizes, count = json.loads(sys.argv[1]), int(sys.argv[2])
    chosen = random.Random(0)
    untiled = [sizes[0], 1, 1, 1, sizes[1], 1, sizes[2], 1, 1, 1]
    flat = [1, 1, 1, sizes[0], 1, sizes[1], 1, 1, 1, sizes[2]]
    drawn = [
        [
            value
            for size, parts in zip(sizes, (4, 2, 4), strict=True)
            for value in split(size, parts, chosen)
        ]
        for _ in range(count)
    ]
    too_few = [*untiled[:6], sizes[2] // 2, 1, 1, 1]
    found = {}
    for target in (TvmGemm, DoesNothing, MissesOneProduct):
        tried = [untiled, flat, *drawn, too_few] if target is TvmGemm else [untiled]
        with Pool(target(*sizes)) as pool:
            for values in tried:
                pool.submit(dict(zip(NAMES, values, strict=True)))
            found[target.__name__] = []
            while pool.pending:
                found[target.__name__] += [each.to_json() for each in pool.results()]
    print(json.dumps(found | {"describe": TvmGemm(*sizes).describe()}))


if __name__ == "__main__":
    main()
