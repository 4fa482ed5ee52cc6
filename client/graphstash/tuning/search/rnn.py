"""A recurrent controller that writes configurations value by value.

    h_0 = 0;  h_t, c_t = LSTM(embedding of value t-1, h_t-1, c_t-1)
    P(value t | values before) = softmax(W_t h_t + log of the number of configurations below it)
    descend -(r - baseline) * sum over t of log P(value t), the baseline a running mean of r

(Policy gradients: Williams, "Simple statistical gradient-following algorithms for connectionist
reinforcement learning", 1992. arXiv 1909.10616 compares with such a controller; these details are
our own.) W starts at 0, so the first configurations are drawn uniformly. If the controller repeats
a configuration, it learns from the known cost.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphstash.tuning.search._numpy_networks import Adam, Floats, Rewards, choose, log_softmax
from graphstash.tuning.search.base import Searcher, Trial
from graphstash.tuning.space import Configuration, SpaceError
from graphstash.tuning.spaces.tree import TreeSpace

__all__ = ["Controller", "RNNController", "Sequences"]

MAX_ROUNDS_OF_OLD = 2
"""Maximum batches that the controller writes per round to find enough new configurations."""


class Sequences(NamedTuple):
    """B configurations that the controller wrote, of T parameters with at most V values."""

    places: NDArray[np.int64]  # [B, T], index of the chosen value
    prior: Floats  # [B, T, V], log share of the configurations below; -inf for none


class Controller:
    """An LSTM with an embedding and a head for each parameter."""

    def __init__(
        self, values: Sequence[int], *, hidden: int, learning_rate: float, seed: int
    ) -> None:
        draw = np.random.default_rng(seed)
        steps, most = len(values), max(values)
        scale = hidden**-0.5
        self.hidden = hidden
        self.parameters: dict[str, Floats] = {
            "embedding": draw.normal(0, 1, (steps, most, hidden)),  # previous value; [0] unused
            "lstm": draw.normal(0, scale, (2 * hidden, 4 * hidden)),
            "lstm_bias": np.zeros(4 * hidden),
            "heads": np.zeros((steps, hidden, most)),
            "head_biases": np.zeros((steps, most)),
        }
        self._adam = Adam(self.parameters, learning_rate)

    def start(self, count: int) -> tuple[Floats, Floats]:
        """Return h and c before the first value, [count, hidden]."""
        return np.zeros((count, self.hidden)), np.zeros((count, self.hidden))

    def step(
        self, t: int, before: NDArray[np.int64] | None, h: Floats, c: Floats
    ) -> tuple[Floats, Floats, Floats, tuple[Floats, ...]]:
        """Return the logits of parameter t, [B, V], the new h and c, and data for `gradients`."""
        p = self.parameters
        x = np.zeros_like(h) if before is None else p["embedding"][t, before]
        both = np.concatenate([x, h], axis=1)
        gates = both @ p["lstm"] + p["lstm_bias"]
        take, keep, show = (
            _sigmoid(gates[:, i * self.hidden : (i + 1) * self.hidden]) for i in range(3)
        )
        new = np.tanh(gates[:, 3 * self.hidden :])
        c_after = keep * c + take * new
        shown = np.tanh(c_after)
        h_after = show * shown
        logits = h_after @ p["heads"][t] + p["head_biases"][t]
        return logits, h_after, c_after, (both, take, keep, show, new, c, shown, h_after)

    def gradients(
        self, written: Sequences, advantage: Floats, entropy_weight: float
    ) -> dict[str, Floats]:
        """Return gradients of the mean of -(advantage * log P + entropy_weight * entropy)."""
        count, steps = written.places.shape
        h, c = self.start(count)
        kept, into_logits = [], []
        rows = np.arange(count)
        for t in range(steps):
            before = written.places[:, t - 1] if t else None
            logits, h, c, cache = self.step(t, before, h, c)
            logs = log_softmax(logits + written.prior[:, t])
            probabilities = np.exp(logs)
            finite = np.where(np.isfinite(logs), logs, 0)
            entropy = -(probabilities * finite).sum(axis=1, keepdims=True)
            gradient = probabilities.copy()
            gradient[rows, written.places[:, t]] -= 1
            gradient *= advantage[:, None]
            gradient += entropy_weight * probabilities * (finite + entropy)
            kept.append(cache)
            into_logits.append(gradient / count)
        return self._backwards(written, kept, into_logits)

    def _backwards(
        self, written: Sequences, kept: list[tuple[Floats, ...]], into_logits: list[Floats]
    ) -> dict[str, Floats]:
        p = self.parameters
        found = {name: np.zeros_like(each) for name, each in p.items()}
        into_h, into_c = self.start(len(written.places))
        for t in reversed(range(len(kept))):
            both, take, keep, show, new, c, shown, h = kept[t]
            found["heads"][t] = h.T @ into_logits[t]
            found["head_biases"][t] = into_logits[t].sum(axis=0)
            into_h = into_h + into_logits[t] @ p["heads"][t].T
            into_c = into_c + into_h * show * (1 - shown**2)
            into_gates = np.concatenate(
                [
                    into_c * new * take * (1 - take),
                    into_c * c * keep * (1 - keep),
                    into_h * shown * show * (1 - show),
                    into_c * take * (1 - new**2),
                ],
                axis=1,
            )
            found["lstm"] += both.T @ into_gates
            found["lstm_bias"] += into_gates.sum(axis=0)
            into_both = into_gates @ p["lstm"].T
            if t:
                np.add.at(
                    found["embedding"][t], written.places[:, t - 1], into_both[:, : self.hidden]
                )
            into_h, into_c = into_both[:, self.hidden :], into_c * keep
        return found

    def learn(self, written: Sequences, advantage: Floats, entropy_weight: float) -> None:
        """Take one step of Adam."""
        self._adam.step(self.gradients(written, advantage, entropy_weight))


class RNNController(Searcher):
    """An LSTM that writes configurations, trained by policy gradients. Needs numpy.

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: configurations to measure before all others.
        batch: maximum configurations per round.
        hidden: width of the LSTM.
        learning_rate: learning rate of Adam.
        entropy_weight: weight of the policy's entropy, which rewards exploration.
        momentum: momentum of the baseline, from 0 to 1.

    Raises:
        SpaceError: a configuration of `first` is not in the space, or the space cannot be written
            value by value.
        ValueError: batch is below 1.
    """

    def __init__(
        self,
        space: TreeSpace,
        *,
        seed: int = 0,
        first: Sequence[Configuration] = (),
        batch: int = 8,
        hidden: int = 64,
        learning_rate: float = 5e-3,
        entropy_weight: float = 0.05,
        momentum: float = 0.9,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        if not isinstance(space, TreeSpace):
            raise SpaceError(
                f"the controller writes value by value, and {type(space).__name__} does not say "
                "which values may follow: make it a TreeSpace, or take another searcher"
            )
        super().__init__(space, seed=seed, first=first)
        self._tree = space
        self._batch = batch
        self._entropy_weight = entropy_weight
        self._momentum = momentum
        self._baseline: float | None = None
        self._rewards = Rewards()
        self._known: dict[Configuration, float] = {}  # rewards
        self._sequences: list[tuple[Configuration, Sequences]] = []
        self.network = Controller(
            [len(values) for values in space.values],
            hidden=hidden,
            learning_rate=learning_rate,
            seed=self._random.getrandbits(32),
        )

    def _propose(self) -> list[Configuration]:
        self._sequences = []
        new: dict[Configuration, None] = {}
        for _ in range(MAX_ROUNDS_OF_OLD):
            for configuration, written in self._draw_sequences():
                if len(new) == self._batch:
                    break
                self._sequences.append((configuration, written))
                if configuration not in self._visited:
                    new[configuration] = None
        return list(new) or self._unvisited(self._batch)

    def _draw_sequences(self) -> list[tuple[Configuration, Sequences]]:
        h, c = self.network.start(self._batch)
        chosen: list[Configuration] = [()] * self._batch
        most = max(map(len, self._tree.values))
        places = np.zeros((self._batch, len(self._tree.values)), dtype=np.int64)
        prior = np.full((self._batch, len(self._tree.values), most), -np.inf)
        for t, values in enumerate(self._tree.values):
            before = places[:, t - 1] if t else None
            logits, h, c, _ = self.network.step(t, before, h, c)
            for row, prefix in enumerate(chosen):
                after = self._tree.continuations(prefix)
                total = sum(after.values())
                for place, value in enumerate(values):
                    if value in after:
                        prior[row, t, place] = math.log(after[value] / total)
            logs = log_softmax(logits + prior[:, t])
            for row, prefix in enumerate(chosen):
                places[row, t] = choose(logs[row], self._random)
                chosen[row] = (*prefix, values[places[row, t]])
        return [
            (configuration, Sequences(places[row], prior[row]))
            for row, configuration in enumerate(chosen)
        ]

    def _learn(self, trials: list[Trial]) -> None:
        for trial in trials:
            self._known[trial.configuration] = self._rewards.of(trial.cost)
        written = [(self._known[each], how) for each, how in self._sequences]
        self._sequences = []
        if not written:
            return
        rewards = np.array([reward for reward, _ in written])
        mean = float(rewards.mean())
        if self._baseline is None:
            self._baseline = mean
        self.network.learn(
            Sequences(*(np.stack(each) for each in zip(*(how for _, how in written), strict=True))),
            rewards - self._baseline,
            self._entropy_weight,
        )
        self._baseline += (1 - self._momentum) * (mean - self._baseline)


def _sigmoid(x: Any) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return result
