"""hyperopt's tree of Parzen estimators (TPE) as a searcher, to compare with.

TPE knows no constraints between parameters, and nearly all combinations of values break them. So
each suggestion becomes the unvisited configuration that differs from it in the fewest parameters,
and then by the fewest places in the lists of values. TPE learns that configuration, with its cost.
"""

import math

import numpy as np
from hyperopt import JOB_STATE_DONE, STATUS_FAIL, STATUS_OK, Trials, hp, tpe
from hyperopt.base import Domain

from graphstash.tuning import Searcher

__all__ = ["Hyperopt"]

RANDOM = 5
"""Random suggestions before the model's. hyperopt's default of 20 is more than a small budget."""


class Hyperopt(Searcher):
    """TPE (Bergstra et al., 2011) with hyperopt's defaults except `RANDOM`."""

    def __init__(self, space, *, seed=0):
        super().__init__(space, seed=seed)
        options = {name: hp.choice(name, values) for name, values in self._named(space.values)}
        self._domain = Domain(lambda _: 0.0, options)
        self._tried = Trials()
        self._all = list(space)
        place = [{value: i for i, value in enumerate(values)} for values in space.values]
        self._places = np.array(
            [[at[value] for at, value in zip(place, each, strict=True)] for each in self._all]
        )
        self._left = np.ones(len(self._all), dtype=bool)

    def _named(self, values):
        return zip(self.space.names, values, strict=True)

    def _propose(self):
        if not self._left.any():
            return []
        seed = self._random.getrandbits(31)
        [number] = self._tried.new_trial_ids(1)
        [self._doc] = tpe.suggest(
            [number], self._domain, self._tried, seed, n_startup_jobs=RANDOM, verbose=False
        )
        wanted = np.array([self._doc["misc"]["vals"][name][0] for name in self.space.names])
        away = np.abs(self._places - wanted)
        far = 1000 * (away > 0).sum(axis=1) + away.sum(axis=1)
        row = int(np.where(self._left, far, np.iinfo(far.dtype).max).argmin())
        self._left[row] = False
        for name, place in self._named(self._places[row].tolist()):
            self._doc["misc"]["vals"][name] = [place]
        return [self._all[row]]

    def _learn(self, trials):
        [(_, cost)] = trials
        failed = {"status": STATUS_FAIL}
        works = {"status": STATUS_OK, "loss": cost}
        self._doc["state"] = JOB_STATE_DONE
        self._doc["result"] = works if math.isfinite(cost) else failed
        self._tried.insert_trial_docs([self._doc])
        self._tried.refresh()
