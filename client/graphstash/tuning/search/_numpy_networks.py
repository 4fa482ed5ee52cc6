"""Common parts of the two searchers with networks: rewards, a masked softmax, and Adam.

The networks are small: some thousand parameters, about ten rows at a time. A step in numpy takes a
hundredth of the time of importing torch. JAX users have numpy, and it starts no threads that
disturb measurements. Tests compare the hand-written gradients with torch's.
"""

import math
import random
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Adam", "Floats", "Rewards", "choose", "log_softmax"]

Floats: TypeAlias = NDArray[np.float64]


class Rewards:
    """Rewards log(first cost / cost): 0 for the first configuration, 0.69 for twice its speed.

    A failure gets 1 less than the lowest reward so far.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._worst = 0.0

    def of(self, cost: float) -> float:
        """Return the reward for a cost. The first finite cost sets the scale."""
        if not math.isfinite(cost):
            return self._worst - 1
        if self._first is None:
            self._first = cost
        reward = math.log(self._first) - math.log(cost)
        self._worst = min(self._worst, reward)
        return reward


def log_softmax(logits: Floats) -> Floats:
    """Return the log-softmax over the last axis. Entries of minus infinity remain."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def choose(log_probabilities: Floats, random: random.Random) -> int:
    """Draw an index from its log probabilities."""
    sums = np.cumsum(np.exp(log_probabilities))
    place = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
    return min(place, int(np.flatnonzero(np.isfinite(log_probabilities))[-1]))


class Adam:
    """Adam (Kingma and Ba, arXiv 1412.6980, 2014); updates the arrays in place."""

    def __init__(self, parameters: dict[str, Floats], learning_rate: float) -> None:
        self._parameters = parameters
        self._rate = learning_rate
        self._mean = {name: np.zeros_like(each) for name, each in parameters.items()}
        self._square = {name: np.zeros_like(each) for name, each in parameters.items()}
        self._step = 0

    def step(self, gradients: dict[str, Floats]) -> None:
        """Take one step."""
        self._step += 1
        for name, gradient in gradients.items():
            self._mean[name] += 0.1 * (gradient - self._mean[name])
            self._square[name] += 0.001 * (gradient**2 - self._square[name])
            mean = self._mean[name] / (1 - 0.9**self._step)
            square = self._square[name] / (1 - 0.999**self._step)
            self._parameters[name] -= self._rate * mean / (np.sqrt(square) + 1e-8)
