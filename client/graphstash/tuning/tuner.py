"""The loop of a search: ask, measure, tell; at the end, the best few against each other."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Final, Literal, NamedTuple

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

__all__ = ["Result", "search"]

_log = logging.getLogger("graphstash")

_MAX_FINALISTS: Final = 64


class Result(NamedTuple):
    """What a search found.

    Attributes:
        best: the cheapest finalist; None where nothing works.
        measurement: of the best one, from the finalists' round.
        measurements: all that were made here, in the order of their end, those of the finalists'
            round last: a finalist occurs twice.
        known: how many were known before and told to the searcher.
        seconds: that the search took.
        ended: why no further configuration was measured: the budget of measurements, that of
            seconds, or that the searcher had none left.
    """

    best: Configuration | None
    measurement: Measurement | None
    measurements: list[Measurement]
    known: int
    seconds: float
    ended: Literal["measurements", "seconds", "exhausted"]


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
) -> Result:
    """Searches a fast configuration.

    One measurement of a configuration may be off, and the cheapest of many is likely to be so.
    Therefore the best few, known ones included, are measured again, in turns and alone, and only
    that decides. If all of them fail in that round, the next few are measured.
    With one worker, the same seed and the same costs give the same search.

    Args:
        searcher: chooses what to measure; may have been told of trials before.
        target: what is measured.
        budget: when to stop. The finalists' round comes on top of it.
        workers: how many configurations are built side by side, 1 or more. They run one at a time.
        finalists: how many take part in that round, from 1 to 64: all are in memory together.
        method: how thoroughly each is measured; `Method()` by default.
        executor: where it is measured: by default in processes of this host. `RayPool` takes the
            machines of a Ray cluster, `partial(RayPool, options={"num_gpus": 1})` those with GPUs.
        known: earlier measurements of the same target on equal machines. The searcher is told of
            them; they are not measured again, except as finalists. Those that are not of the space
            are left out.
        publish: is called with each new measurement; a finalist's second one replaces its first.
            What it raises is logged and changes nothing.

    Raises:
        MeasuringError: when the target cannot be measured here at all.
        ValueError: for a number that is too small or too large.
    """
    if not 1 <= finalists <= _MAX_FINALISTS:
        raise ValueError(f"finalists must be from 1 to {_MAX_FINALISTS} (got {finalists})")
    started = monotonic()
    told = _tell_known(searcher, known)
    measurements: list[Measurement] = []

    def record(measurement: Measurement) -> None:
        measurements.append(measurement)
        _publish(publish, measurement)

    with executor(target, workers=workers, method=method or Method()) as pool:
        ended = _measure(searcher, pool, budget, started, record)
        last: list[Measurement] = []
        for few in _batched(_cheapest(searcher), finalists):
            last = pool.compare(few)
            for measurement in last:
                record(measurement)
            if any(measurement.cost is not None for measurement in last):
                break
    works = [measurement for measurement in last if measurement.cost is not None]
    best = min(works, key=lambda each: each.cost or math.inf, default=None)
    return Result(
        best=None if best is None else searcher.space.configuration(best.configuration),
        measurement=best,
        measurements=measurements,
        known=told,
        seconds=monotonic() - started,
        ended=ended,
    )


def _tell_known(searcher: Searcher, known: Iterable[Measurement]) -> int:
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
    record: Callable[[Measurement], None],
) -> Literal["measurements", "seconds", "exhausted"]:
    """Measures what the searcher asks for, and returns why it ended."""
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
            record(measurement)
            searcher.tell(*measurement.trial(searcher.space))


def _cheapest(searcher: Searcher) -> list[dict[str, Value]]:
    """Return the configurations that work, each once, the cheapest first."""
    works = [trial for trial in searcher.trials if math.isfinite(trial.cost)]
    cheapest = sorted(works, key=lambda trial: trial.cost)
    distinct = dict.fromkeys(trial.configuration for trial in cheapest)
    return [searcher.space.named(each) for each in distinct]


def _batched(
    configurations: Sequence[dict[str, Value]], count: int
) -> Iterator[Sequence[dict[str, Value]]]:
    """Return slices of at most `count` (itertools.batched needs Python 3.12)."""
    return (configurations[start : start + count] for start in range(0, len(configurations), count))


def _publish(publish: Callable[[Measurement], object] | None, measurement: Measurement) -> None:
    if publish is None:
        return
    try:
        publish(measurement)
    except Exception:  # noqa: BLE001 - of the caller's code: the search goes on
        _log.exception("a measurement was not published")
