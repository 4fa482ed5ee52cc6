"""Measurements of configurations, how thoroughly to measure, and when a search ends."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, Final, Generic, cast

from typing_extensions import TypeVar

from graphstash.tuning.search.base import Trial
from graphstash.tuning.space import MAX_COST, Configuration, SearchSpace, Value

__all__ = ["FAILURES", "FIELDS", "MAX_SAMPLES", "Budget", "Measurement", "Method", "named_values"]

C = TypeVar("C", default=dict[str, Value])

FIELDS: Final = ("configuration", "cost", "spread", "count", "failure")
"""Fields of a measurement in JSON."""

FAILURES: Final = {
    "compile": "building it raised an error",
    "run": "running it raised an error",
    "wrong": "its result is not the reference result",
    "memory": "it needs more memory than a trial may have",
    "timeout": "building or running it took longer than a trial may take",
    "crash": "its process ended, or sent something else than a result",
    "cost": f"its cost is no number above 0 and at most {MAX_COST:g}",
}
"""Failures of a configuration, and their meanings."""

MAX_SAMPLES: Final = 1000
"""Maximum samples of one configuration."""

_MAX_COUNT: Final = 10**6
_FAILURE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Measurement(Generic[C]):
    """The result of measuring a configuration, on one host or on all of them.

    The cost is the median of the samples: outliers of any size do not matter as long as fewer than
    half of the samples are outliers.

    Attributes:
        configuration: value of each parameter by its name, or a configuration of a space.
        cost: cost of one call in seconds, or in the target's unit, above 0 and at most `MAX_COST`;
            None after a failure.
        spread: interquartile range of the samples, in the unit of the cost; 0 for a single sample.
        count: number of samples, at most 1,000,000; 0 after a failure.
        failure: reason for the missing cost, a lower-case word such as a key of `FAILURES`; None if
            there is a cost.
        hosts: self-reported names of the measuring hosts, for display only; not in `to_json`.

    Raises:
        ValueError: on construction, if a value is out of range. The message names the value.
    """

    configuration: C
    cost: float | None
    spread: float = 0.0
    count: int = 0
    failure: str | None = None
    hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if (problem := _problem(self.cost, self.spread, self.count, self.failure)) is not None:
            raise ValueError(problem)

    @classmethod
    def of(cls, configuration: Mapping[str, Value], samples: Sequence[object]) -> "Measurement":
        """Return a measurement of samples. Its failure is "cost" unless all samples are costs."""
        if not samples or not all(map(_is_cost, samples)):
            return Measurement.failed(configuration, "cost")
        costs: list[float] = [float(sample) for sample in samples]  # type: ignore[arg-type] # checked
        spread = 0.0
        if len(costs) > 1:
            low, _, high = statistics.quantiles(costs, n=4, method="inclusive")
            spread = high - low
        return Measurement(dict(configuration), statistics.median(costs), spread, len(costs))

    @classmethod
    def failed(cls, configuration: Mapping[str, Value], failure: str) -> "Measurement":
        """Return a measurement of a failed configuration; `failure` is a key of `FAILURES`."""
        return Measurement(dict(configuration), None, failure=failure)

    @classmethod
    def from_json(cls, document: object, *, hosts: frozenset[str] = frozenset()) -> "Measurement":
        """Return a measurement from untrusted JSON; the inverse of `to_json`.

        Raises:
            ValueError: the document is not a measurement; the message says why.
        """
        if not isinstance(document, dict) or set(document) != set(FIELDS):
            raise ValueError(f"a measurement has the fields {', '.join(FIELDS)}")
        values = dict(named_values(document["configuration"]))
        return Measurement(**document | {"configuration": values}, hosts=hosts)

    def to_json(self: "Measurement") -> dict[str, Any]:
        """Return the stored form, with the keys `FIELDS`."""
        return {name: getattr(self, name) for name in FIELDS}

    def named(self: "Measurement[Configuration]", space: SearchSpace) -> "Measurement":
        """Return the measurement with its configuration as values by parameter name."""
        return replace(self, configuration=space.named(self.configuration))  # type: ignore[arg-type, return-value] # another form

    def within(self: "Measurement", space: SearchSpace) -> "Measurement[Configuration]":
        """Return the measurement with its configuration as one of the space.

        Raises:
            ValueError: the space lacks the configuration.
        """
        return replace(self, configuration=space.configuration(self.configuration))  # type: ignore[arg-type, return-value] # another form

    def trial(self: "Measurement", space: SearchSpace) -> Trial:
        """Return the trial for a searcher, with infinite cost after a failure.

        Raises:
            ValueError: the space lacks the configuration.
        """
        cost = math.inf if self.cost is None else self.cost
        return Trial(space.configuration(self.configuration), cost)


def named_values(values: object) -> Mapping[str, Value]:
    """Return untrusted JSON, or raise `ValueError` unless it maps parameter names to values."""
    if isinstance(values, dict) and all(
        isinstance(name, str) and (isinstance(each, str | bool) or _is_finite(each))
        for name, each in values.items()
    ):
        return cast("Mapping[str, Value]", values)
    raise ValueError(f"configuration is {short(values)}: it must map names to plain values")


def _problem(cost: object, spread: object, count: object, failure: object) -> str | None:
    if failure is not None:
        if not isinstance(failure, str) or _FAILURE.fullmatch(failure) is None:
            return f"failure is {short(failure)}: it must be null or a lower-case word of 1 to 32"
        has_samples = (cost, spread, count) != (None, 0, 0)
        return "it failed, but has a cost, a spread or samples" if has_samples else None
    if not _is_cost(cost):
        return f"cost is {short(cost)}: it must be a number above 0 and at most {MAX_COST:g}"
    if not _is_cost(spread) and (spread != 0 or isinstance(spread, bool)):
        return f"spread is {short(spread)}: it must be a number from 0 to {MAX_COST:g}"
    if not _is_count(count) or cast("int", count) > _MAX_COUNT:
        return f"count is {short(count)}: it must be an integer from 1 to {_MAX_COUNT}"
    return None


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and abs(number) < math.inf


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _is_cost(sample: object) -> bool:
    return (
        isinstance(sample, int | float)
        and not isinstance(sample, bool)
        and 0 < sample <= MAX_COST  # False for NaN
    )


@dataclass(frozen=True, kw_only=True)
class Method:
    """How thoroughly a configuration is measured.

    Attributes:
        samples: number of samples of a configuration, from 1 to 1000. Of finalists, the minimum.
        final_samples: maximum number of samples of each finalist, on average, from 1 to 1000. They
            are compared until one of them is proven the cheapest, or this many are taken.
        sample_seconds: minimum seconds of a sample; a sample calls a quick kernel repeatedly.
        trial_seconds: seconds of a configuration's warm-up and samples after which it gets no
            further sample, except the first. The exact cost of a slow configuration does not
            matter.
        timeout_seconds: seconds for the build, and for each check or sample, before the measuring
            process is killed.
        memory_bytes: bytes that a measuring process may allocate on the host (RLIMIT_DATA); None
            for no limit. A host that runs out of memory kills measuring processes first.
    """

    samples: int = 5
    final_samples: int = 100
    sample_seconds: float = 0.002
    trial_seconds: float = 0.5
    timeout_seconds: float = 10.0
    memory_bytes: int | None = None

    def most_seconds(self, count: int) -> float:
        """Return the maximum seconds in which one process measures `count` configurations.

        A configuration is built, checked, warmed up and checked again. Its last sample may begin
        just before `trial_seconds`. Each of these steps may take `timeout_seconds`.
        """
        samples = max(self.samples, self.final_samples) * self.timeout_seconds
        sampling = min(samples, self.trial_seconds + self.timeout_seconds)
        return count * (3 * self.timeout_seconds + sampling)

    def __post_init__(self) -> None:
        for name in ("samples", "final_samples"):
            if not (_is_count(count := getattr(self, name)) and count <= MAX_SAMPLES):
                raise ValueError(f"{name} must be from 1 to {MAX_SAMPLES} (got {count})")
        for name in ("sample_seconds", "trial_seconds", "timeout_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0")
        if self.memory_bytes is not None and not _is_count(self.memory_bytes):
            raise ValueError(
                f"memory_bytes must be a whole number, at least 1 (got {self.memory_bytes})"
            )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a search ends; the first limit that is reached counts.

    Attributes:
        measurements: number of configurations to measure, not counting known ones.
        seconds: seconds after which no further measurement starts.
    """

    measurements: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.measurements is None and self.seconds is None:
            raise ValueError("a budget needs measurements, seconds or both")
        if self.measurements is not None and not _is_count(self.measurements):
            raise ValueError(
                f"measurements must be a whole number, at least 1 (got {self.measurements})"
            )
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0 (got {self.seconds})")
