"""A model of costs that learns from a few measurements, without numpy.

A Gaussian process of the logarithm of costs, scaled to mean 0 and variance 1. Its kernel is half a
mean over the parameters, which learns what each parameter does alone (Duvenaud et al., "Additive
Gaussian Processes", arXiv 1112.4394, 2011), and half a product, which learns the rest:

    k(x, y) = 1/2 mean over i of exp(-|x_i - y_i| / LENGTH)
            + 1/2 exp(-2 / LENGTH * mean over i of |x_i - y_i|)
    score   = mean - standard deviation of the prediction
"""

import math
from collections.abc import Sequence
from functools import cache
from operator import mul
from statistics import fmean, pstdev
from typing import Final

__all__ = ["CostModel"]

LENGTH: Final = 0.7
"""Difference of a feature, of -1 to 1, at which similarity has fallen to 1 / e."""

NOISE: Final = 0.1
"""Variance of what the kernel cannot express, and of measuring."""


class CostModel:
    """Predicts costs from features.

    Args:
        features: numbers from about -1 to 1, equally many for each configuration.
        costs: their costs. At least two are finite and have different logarithms. An infinite cost
            counts as the highest finite one.
    """

    def __init__(self, features: Sequence[Sequence[float]], costs: Sequence[float]) -> None:
        worst = max(filter(math.isfinite, costs))
        logs = [math.log(min(cost, worst)) for cost in costs]
        mean, deviation = fmean(logs), pstdev(logs)
        self._parameters = list(zip(*features, strict=True))
        self._near = cache(self._near_in)
        self._lower: list[list[float]] = []  # of Cholesky
        for i, each in enumerate(features):
            row = self._solve(self._similar(each)[:i])
            self._lower.append([*row, math.sqrt(1 + NOISE - sum(map(mul, row, row)))])
        self._solved = self._solve([(each - mean) / deviation for each in logs])

    def score(self, features: Sequence[float]) -> float:
        """Return an optimistic prediction: lower for configurations to measure next."""
        row = self._solve(self._similar(features))
        variance = 1 - sum(map(mul, row, row))
        mean: float = sum(map(mul, row, self._solved))
        return mean - math.sqrt(max(0, variance))

    def _similar(self, features: Sequence[float]) -> list[float]:
        count = len(features)
        each = [self._near(i, feature) for i, feature in enumerate(features)]
        return [
            (sum(column) / count + math.prod(column) ** (2 / count)) / 2
            for column in zip(*each, strict=True)
        ]

    def _near_in(self, parameter: int, feature: float) -> list[float]:
        known = self._parameters[parameter]
        return [math.exp(-abs(feature - each) / LENGTH) for each in known]

    def _solve(self, right: Sequence[float]) -> list[float]:
        """Solve lower x = right, for as many rows as `right` has."""
        found: list[float] = []
        for row, value in zip(self._lower, right, strict=False):
            found.append((value - sum(map(mul, row, found))) / row[len(found)])
        return found
