"""Neighbourhood actor advantage critic (N-A2C).

    repeat: collect: walk from the best state so far, at most `steps` moves per walk; a move is
                     random with probability epsilon, else drawn from the policy; unvisited
                     states go into the batch, until it is full or `MAX_WALKS` walks find none
            measure the batch; r = log(first cost / cost)
            A = r + discount * V(s') - V(s), a constant for the policy
            descend -log pi(a | s) * A  and  (r + discount * V(s') - V(s))^2, V(s') a constant

(Zhang et al., "Compiler-Level Matrix Multiplication Optimization for Deep Learning", arXiv
1909.10616, 2019.) Walks of three moves, epsilon 0.1, batches of six, one update per batch, 128
hidden units and Adam's 0.001 are those of NNI (microsoft/nni, examples/trials/systems_auto_tuning/
opevo), which has the loop above. The paper's text was not available: whether these are its numbers,
and whether it changes epsilon or the length of walks during a search, is not verified. Differences
from NNI:

* The reward is the logarithm of speed, which does not depend on its unit; a failure gets 1 less
  than the lowest reward so far. In NNI, the reward is the speed, and 0 for a failure.
* NNI descends log pi(a | s) * A, which makes good moves less likely, and through A as well.
* Illegal moves are masked before the softmax and never drawn at random. In NNI, they are drawn, and
  the walk stays where it is.
* A full batch ends a walk. NNI completes the walk, so its batch may have two states more.
* The hidden layer is tanh of features from -1 to 1. NNI: ReLU of factor / length - 0.5.
* The search begins with random states, not with the untiled one. If the walks find no unvisited
  state, the batch consists of random unvisited states. NNI walks forever.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphstash.tuning.search._numpy_networks import Adam, Floats, Rewards, choose, log_softmax
from graphstash.tuning.search.base import Searcher, Trial
from graphstash.tuning.space import Configuration, SearchSpace

__all__ = ["NA2C", "ActorCritic", "Transitions"]

MAX_WALKS = 20
"""Consecutive walks without a new state after which the batch is complete."""


class Transitions(NamedTuple):
    """A batch of moves: B moves, F features, M moves per state."""

    before: Floats  # [B, F]
    after: Floats  # [B, F]
    legal: NDArray[np.bool_]  # [B, M], in the state before
    moves: NDArray[np.int64]  # [B]
    rewards: Floats  # [B]


class ActorCritic:
    """A hidden tanh layer with two outputs: a policy over moves, and the value of a state."""

    def __init__(
        self, features: int, moves: int, *, hidden: int, learning_rate: float, seed: int
    ) -> None:
        draw = np.random.default_rng(seed)
        self.parameters: dict[str, Floats] = {
            "hidden": draw.normal(0, features**-0.5, (features, hidden)),
            "hidden_bias": np.zeros(hidden),
            "policy": draw.normal(0, 0.01, (hidden, moves)),
            "policy_bias": np.zeros(moves),
            "value": draw.normal(0, 0.01, hidden),
            "value_bias": np.zeros(1),
        }
        self._adam = Adam(self.parameters, learning_rate)

    def log_policy(self, states: Floats, legal: NDArray[np.bool_]) -> Floats:
        """Return the log probability of each state's moves, [B, M]; -inf for illegal moves."""
        hidden = self._hidden(states)
        logits = hidden @ self.parameters["policy"] + self.parameters["policy_bias"]
        return log_softmax(np.where(legal, logits, -np.inf))

    def values(self, states: Floats) -> Floats:
        """Return the value of each state, [B]."""
        result: Floats = (
            self._hidden(states) @ self.parameters["value"] + self.parameters["value_bias"]
        )
        return result

    def gradients(self, batch: Transitions, discount: float) -> dict[str, Floats]:
        """Return gradients of the batch mean of -log pi(a | s) * A + A^2; see the module."""
        count = len(batch.moves)
        hidden = self._hidden(batch.before)
        advantage = batch.rewards + discount * self.values(batch.after) - self.values(batch.before)
        logits = np.exp(self.log_policy(batch.before, batch.legal))
        logits[np.arange(count), batch.moves] -= 1
        logits *= advantage[:, None] / count  # d(-log pi(a) A) / d logits = (pi - onehot) A
        value = -2 * advantage / count
        into_hidden = logits @ self.parameters["policy"].T + np.outer(
            value, self.parameters["value"]
        )
        into_hidden *= 1 - hidden**2
        return {
            "hidden": batch.before.T @ into_hidden,
            "hidden_bias": into_hidden.sum(axis=0),
            "policy": hidden.T @ logits,
            "policy_bias": logits.sum(axis=0),
            "value": hidden.T @ value,
            "value_bias": value.sum(keepdims=True),
        }

    def learn(self, batch: Transitions, discount: float) -> None:
        """Take one step of Adam."""
        self._adam.step(self.gradients(batch, discount))

    def _hidden(self, states: Floats) -> Floats:
        result: Floats = np.tanh(
            states @ self.parameters["hidden"] + self.parameters["hidden_bias"]
        )
        return result


class NA2C(Searcher):
    """A policy and a value network that walk from the best configuration so far. Needs numpy.

    Args:
        space: the space to search.
        seed: seed of every choice.
        first: configurations to measure first, instead of `starts`.
        starts: number of random configurations to measure first. 0: measure the start of the space,
            as in the paper.
        batch: maximum number of configurations per round.
        steps: maximum number of moves in a walk.
        epsilon: probability of a random move.
        discount: weight of the next state's value, from 0 to 1.
        hidden: width of the hidden layer.
        learning_rate: learning rate of Adam.
        updates: number of updates per batch.

    Raises:
        SpaceError: a configuration of `first` is not in the space.
        ValueError: batch or steps is below 1.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int = 0,
        first: Sequence[Configuration] = (),
        starts: int = 8,
        batch: int = 6,
        steps: int = 3,
        epsilon: float = 0.1,
        discount: float = 0.0,
        hidden: int = 128,
        learning_rate: float = 1e-3,
        updates: int = 1,
    ) -> None:
        if batch < 1 or steps < 1:
            raise ValueError(f"batch is {batch}, steps is {steps}: both must be at least 1")
        super().__init__(space, seed=seed, first=first)
        self._begin(starts)
        self._batch = batch
        self._steps = steps
        self._epsilon = epsilon
        self._discount = discount
        self._updates = updates
        self._rewards = Rewards()
        self._best: Trial | None = None
        self._walked: dict[Configuration, tuple[Configuration, int]] = {}  # after: before, move
        self.network = ActorCritic(
            len(space.features(space.start)),
            space.moves,
            hidden=hidden,
            learning_rate=learning_rate,
            seed=self._random.getrandbits(32),
        )

    def _propose(self) -> list[Configuration]:
        self._walked.clear()
        chosen: dict[Configuration, None] = {}
        walks = 0
        while len(chosen) < self._batch and walks < MAX_WALKS and self._best is not None:
            before = len(chosen)
            self._walk(self._best.configuration, chosen)
            walks = 0 if len(chosen) > before else walks + 1
        return list(chosen) or self._unvisited(self._batch)

    def _walk(self, state: Configuration, chosen: dict[Configuration, None]) -> None:
        for _ in range(self._steps):
            if (move := self._choose_move(state)) is None or len(chosen) == self._batch:
                return
            after = self.space.moved(state, move)
            assert after is not None  # noqa: S101 - the move is legal
            if after not in self._visited and after not in chosen:
                chosen[after] = None
                self._walked[after] = (state, move)
            state = after

    def _choose_move(self, state: Configuration) -> int | None:
        legal = self._legal_moves(state)
        if not legal.any():
            return None
        if self._random.random() < self._epsilon:
            return int(self._random.choice(np.flatnonzero(legal).tolist()))
        return choose(
            self.network.log_policy(self._features([state]), legal[None])[0], self._random
        )

    def _learn(self, trials: list[Trial]) -> None:
        for trial in trials:
            if self._best is None or trial.cost < self._best.cost:
                self._best = trial
        rewards = [self._rewards.of(trial.cost) for trial in trials]
        moved = [
            (self._walked[trial.configuration], trial.configuration, reward)
            for trial, reward in zip(trials, rewards, strict=True)
            if trial.configuration in self._walked
        ]
        if not moved:
            return
        batch = Transitions(
            before=self._features([state for (state, _), _, _ in moved]),
            after=self._features([state for _, state, _ in moved]),
            legal=np.array([self._legal_moves(state) for (state, _), _, _ in moved]),
            moves=np.array([move for (_, move), _, _ in moved]),
            rewards=np.array([reward for _, _, reward in moved]),
        )
        for _ in range(self._updates):
            self.network.learn(batch, self._discount)

    def _legal_moves(self, state: Configuration) -> NDArray[np.bool_]:
        return np.array(
            [self.space.moved(state, move) is not None for move in range(self.space.moves)]
        )

    def _features(self, states: list[Configuration]) -> Floats:
        return np.array([self.space.features(state) for state in states], dtype=float)
