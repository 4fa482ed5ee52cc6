"""The loop of a search: ask the searcher, measure, tell it the costs; then compare the best few."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Final, Literal, NamedTuple, TypeAlias

from graphstash.tuning.measuring import (
    Budget,
    Executor,
    MakeExecutor,
    Measurement,
    Method,
    Pool,
    Target,
)
from graphstash.tuning.search.base import Searcher
from graphstash.tuning.space import Configuration, Value

__all__ = ["Progress", "Result", "search"]

_log = logging.getLogger("graphstash")

_MAX_FINALISTS: Final = 64

Ended: TypeAlias = Literal["measurements", "seconds", "exhausted"]
"""Why measuring ended: the limit of measurements, the limit of seconds, or because the searcher had
no further configurations."""


class Progress(NamedTuple):
    """State of a search, without the finalists' round.

    Attributes:
        measurements: number of configurations that this search has measured.
        failures: number of failed configurations by failure, such as a key of `FAILURES`.
        best_cost: lowest cost of this search and of known measurements; None if nothing works yet.
        seconds: duration so far.
        ended: None while the search measures.
    """

    measurements: int
    failures: Mapping[str, int]
    best_cost: float | None
    seconds: float
    ended: Ended | None


class Result(NamedTuple):
    """The result of a search.

    Attributes:
        best: the cheapest finalist; None if no configuration works.
        measurement: measurement of the best configuration in the finalists' round.
        measurements: all measurements of this search in order of completion. The finalists' round
            comes last, so a finalist may occur twice.
        known: number of earlier measurements told to the searcher.
        seconds: duration of the search.
        ended: why measuring ended.
    """

    best: Configuration | None
    measurement: Measurement | None
    measurements: list[Measurement]
    known: int
    seconds: float
    ended: Ended


def search(
    searcher: Searcher,
    target: Target,
    *,
    budget: Budget,
    workers: int = 1,
    finalists: int = 5,
    method: Method | None = None,
    executor: MakeExecutor = Pool,
    known: Iterable[Measurement] = (),
    publish: Callable[[Measurement], object] | None = None,
    observe: Callable[[Progress], object] = lambda _: None,
) -> Result:
    """Search for a fast configuration.

    A single measurement may be off, and the cheapest of many probably is. The finalists' round
    therefore measures the best few again, including known ones, in turns and without other load,
    until one is proven the cheapest. Only this round decides. If all finalists fail, the next few
    are measured. With one worker, equal seeds and costs give equal searches.

    Args:
        searcher: chooses configurations; may know trials already.
        target: the kernel to measure.
        budget: limits the search, without the finalists' round.
        workers: see `tune`.
        finalists: number of finalists, from 1 to 64: all are in memory together.
        method: see `tune`.
        executor: see `tune`.
        known: earlier measurements of the same target on equal machines. The searcher learns from
            them; only finalists are measured again. Measurements outside the space are ignored.
        publish: called with each new measurement; a finalist's second measurement replaces its
            first. Exceptions are logged and otherwise ignored.
        observe: see `tune`.
    """
    if not 1 <= finalists <= _MAX_FINALISTS:
        raise ValueError(f"finalists must be from 1 to {_MAX_FINALISTS} (got {finalists})")
    started = monotonic()
    known_count = _replay_known(searcher, known)
    measurements: list[Measurement] = []
    failures: Counter[str] = Counter()
    best_cost = min((trial.cost for trial in searcher.trials), default=math.inf)

    def record(measurement: Measurement) -> None:
        measurements.append(measurement)
        _publish(publish, measurement)

    def learn(measurement: Measurement) -> None:
        nonlocal best_cost
        if measurement.failure is not None:
            failures[measurement.failure] += 1
        elif measurement.cost is not None:
            best_cost = min(measurement.cost, best_cost)
        record(measurement)
        searcher.tell(*measurement.trial(searcher.space))
        report()

    def report(ended: Ended | None = None) -> None:
        seconds = monotonic() - started
        best = best_cost if math.isfinite(best_cost) else None
        observe(Progress(len(measurements), dict(failures), best, seconds, ended))

    with executor(target, workers=workers, method=method or Method()) as pool:
        report()
        ended = _measure(searcher, pool, budget, started, learn)
        report(ended)
        cheapest = _cheapest(searcher)
        last: list[Measurement] = []
        for start in range(0, len(cheapest), finalists):
            last = pool.compare(cheapest[start : start + finalists])
            for measurement in last:
                record(measurement)
            if any(measurement.cost is not None for measurement in last):
                break
    working = [measurement for measurement in last if measurement.cost is not None]
    best = min(working, key=lambda each: each.cost or math.inf, default=None)
    return Result(
        best=None if best is None else searcher.space.configuration(best.configuration),
        measurement=best,
        measurements=measurements,
        known=known_count,
        seconds=monotonic() - started,
        ended=ended,
    )


def _replay_known(searcher: Searcher, known: Iterable[Measurement]) -> int:
    count = 0
    for measurement in known:
        try:
            trial = measurement.trial(searcher.space)
        except ValueError as error:
            _log.warning("a known measurement is left out: %s", error)
        else:
            searcher.tell(*trial)
            count += 1
    return count


def _measure(
    searcher: Searcher,
    pool: Executor,
    budget: Budget,
    started: float,
    learn: Callable[[Measurement], None],
) -> Ended:
    """Measure the searcher's configurations, and return why measuring ended."""
    left = math.inf if budget.measurements is None else budget.measurements
    seconds = math.inf if budget.seconds is None else budget.seconds
    while True:
        is_late = monotonic() - started >= seconds
        if not is_late and (room := min(pool.workers - pool.pending, left)) > 0:
            for configuration in searcher.ask(int(room)):
                pool.submit(searcher.space.named(configuration))
                left -= 1
        if not pool.pending:
            if is_late:
                return "seconds"
            return "exhausted" if left else "measurements"
        for measurement in pool.results():
            learn(measurement)


def _cheapest(searcher: Searcher) -> list[dict[str, Value]]:
    """Return the configurations that work, each once, the cheapest first."""
    working = [trial for trial in searcher.trials if math.isfinite(trial.cost)]
    cheapest = sorted(working, key=lambda trial: trial.cost)
    distinct = dict.fromkeys(trial.configuration for trial in cheapest)
    return [searcher.space.named(each) for each in distinct]


def _publish(publish: Callable[[Measurement], object] | None, measurement: Measurement) -> None:
    if publish is None:
        return
    try:
        publish(measurement)
    except Exception:  # noqa: BLE001 - a failing callback must not end the search
        _log.exception("a measurement was not published")
