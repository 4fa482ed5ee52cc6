"""Findings: the cost of a configuration on one host and over all hosts.

Other hosts wrote this data. This module accepts JSON of bounded size, checks every number, and
returns only configurations of the searched space.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from statistics import median
from typing import Any, Final, NamedTuple, cast

from graphstash.tuning.space import MAX_COST, Configuration, SearchSpace, Value
from graphstash_schema.names import printable

__all__ = [
    "MAX_MEASUREMENTS",
    "MAX_RECORD_BYTES",
    "WRONG",
    "Answer",
    "Finding",
    "merged",
    "read",
    "read_answer",
    "values_of",
]

MAX_RECORD_BYTES: Final = 256 * 1024
"""Largest size of one artifact's JSON."""

MAX_MEASUREMENTS: Final = 512
"""Most measurements in one artifact."""

WRONG: Final = "wrong"
"""Failure of a configuration that gave a wrong result."""

_MAX_COUNT: Final = 10**6
_MAX_MEASURED: Final = 10**12
_MOST_WEIGHT: Final = 10
_HOST_CHARACTERS: Final = 128
_FAILURE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_FIELDS: Final = {"configuration", "cost", "spread", "count", "failure"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The measurements of a configuration.

    Attributes:
        configuration: a configuration of the space.
        cost: median in seconds, above 0 and at most `MAX_COST`; None if the configuration fails.
        spread: interquartile range in seconds, 0 to `MAX_COST`; 0 if it fails.
        count: number of measurements, 0 to 1,000,000; 0 if it fails.
        failure: why it fails, a lower-case word of at most 32 characters; None if it works.
        hosts: self-reported names of the measuring hosts; shown, never trusted.

    Raises:
        ValueError: on construction, if a value is out of range.
    """

    configuration: Configuration
    cost: float | None
    spread: float = 0.0
    count: int = 0
    failure: str | None = None
    hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 0 <= self.count <= _MAX_COUNT:
            raise ValueError(f"the count {short(self.count)} is not from 0 to {_MAX_COUNT}")
        if self.failure is not None and not _is_word(self.failure):
            raise ValueError(f"the failure {self.failure!r} is no lower-case word of 1 to 32")
        if (self.cost is None) is (self.failure is None):
            raise ValueError("a measurement has either a cost or a failure")
        if self.cost is None and (self.spread or self.count):
            raise ValueError("what does not work has no spread and no count")
        if self.cost is not None and not 0 < _number(self.cost) <= MAX_COST:
            raise ValueError(f"the cost {short(self.cost)} is not above 0 and at most {MAX_COST:g}")
        if not 0 <= _number(self.spread) <= MAX_COST:
            raise ValueError(f"the spread {short(self.spread)} is no number from 0 to {MAX_COST:g}")

    def to_json(self, space: SearchSpace) -> dict[str, Any]:
        """Return the finding as JSON, in the form that artifacts hold."""
        return {
            "configuration": space.named(self.configuration),
            "cost": self.cost,
            "spread": self.spread,
            "count": self.count,
            "failure": self.failure,
        }

    @classmethod
    def from_json(
        cls, record: object, space: SearchSpace, *, hosts: frozenset[str] = frozenset()
    ) -> "Finding":
        """Read a finding of another host.

        Raises:
            ValueError: the record is malformed, or not of this space.
        """
        if not isinstance(record, dict) or set(record) != _FIELDS:
            raise ValueError(f"a measurement has the fields {sorted(_FIELDS)}")
        try:
            configuration = space.configuration(_named(record["configuration"]))
        except TypeError as error:  # a value is neither a number nor a text
            raise ValueError(str(error)) from None
        # 1, 1.0 and true are equal, so membership in the space does not imply its types.
        if not space.has_types(configuration):
            raise ValueError(f"{configuration!r} has not the types of the space's values")
        told = {name: record[name] for name in ("cost", "spread", "count", "failure")}
        return cls(configuration, **told, hosts=hosts)


class Answer(NamedTuple):
    """An answer for display; nothing in it is checked against a space.

    Attributes:
        compiler: name and version.
        hosts: names of the hosts that measured.
        measured: number of configurations that these hosts measured.
        best: the record of the best configuration, in the form of `Finding.to_json`.
    """

    compiler: str
    hosts: tuple[str, ...]
    measured: int
    best: Mapping[str, Any]


def read_answer(payload: bytes) -> Answer:
    """Read an answer for display.

    Raises:
        ValueError: the payload is not an answer.
    """
    record = _parsed(payload)
    first = record["measurements"][0]
    values = _named(first.get("configuration") if isinstance(first, dict) else None)
    finding = Finding((), *(first.get(name) for name in ("cost", "spread", "count", "failure")))
    hosts, measured = record.get("hosts"), record.get("measured")
    is_count = type(measured) is int and 0 <= measured <= _MAX_MEASURED
    if not isinstance(hosts, list) or not is_count:
        raise ValueError("it does not say who has measured how much")
    told = {name: getattr(finding, name) for name in ("cost", "spread", "count", "failure")}
    return Answer(
        compiler=printable(str(record.get("compiler", "")), most=_HOST_CHARACTERS),
        hosts=tuple(printable(str(each), most=_HOST_CHARACTERS) for each in hosts),
        measured=cast("int", measured),
        best={"configuration": dict(values), **told},
    )


def read(payload: bytes, space: SearchSpace) -> list[Finding]:
    """Return the measurements of an artifact.

    Raises:
        ValueError: it has no measurements, too many, or one that is malformed or not of the space.
    """
    record = _parsed(payload)
    host = record.get("host")
    hosts = frozenset({printable(host, most=_HOST_CHARACTERS)} if isinstance(host, str) else ())
    return [Finding.from_json(each, space, hosts=hosts) for each in record["measurements"]]


def values_of(payload: bytes) -> list[Mapping[str, Value]]:
    """Return the configurations of another space's artifact; only their form is checked.

    Raises:
        ValueError: the artifact is malformed.
    """
    records = _parsed(payload)["measurements"]
    return [
        _named(each.get("configuration") if isinstance(each, dict) else None) for each in records
    ]


def merged(batches: Iterable[Sequence[Finding]]) -> dict[Configuration, Finding]:
    """Merge the measurements of all hosts, by configuration.

    The cost is the median of the hosts' medians. Each median counts as often as it was measured,
    but at most 10 times, so that no host outvotes all others. The spread is the median of the
    hosts' spreads, or the interquartile range between their costs if that is larger. A
    configuration that works on any host works, since a failure may be specific to a host. A
    configuration with a wrong result on any host is wrong: other hosts may have been lucky.
    """
    by_configuration: defaultdict[Configuration, list[Finding]] = defaultdict(list)
    for batch in batches:
        for each in batch:
            by_configuration[each.configuration].append(each)
    return {key: _one(found) for key, found in by_configuration.items()}


def _one(found: Sequence[Finding]) -> Finding:
    wrong = [each for each in found if each.failure == WRONG]
    working = wrong or [each for each in found if each.cost is not None] or found
    together = replace(
        working[0],
        count=min(sum(each.count for each in working), _MAX_COUNT),
        hosts=frozenset().union(*(each.hosts for each in working)),
    )
    costs = sorted(
        each.cost
        for each in working
        if each.cost is not None
        for _ in range(min(max(1, each.count), _MOST_WEIGHT))
    )
    if len(working) == 1 or not costs:
        return together
    between = costs[3 * (len(costs) - 1) // 4] - costs[(len(costs) - 1) // 4]
    spread = max(median(each.spread for each in working), between)
    return replace(together, cost=median(costs), spread=spread)


def _parsed(payload: bytes) -> dict[str, Any]:
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(payload)} bytes; at most {MAX_RECORD_BYTES}")
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    found = record.get("measurements") if isinstance(record, dict) else None
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_MEASUREMENTS:
        raise ValueError(f"it has no list of 1 to {MAX_MEASUREMENTS} measurements")
    return dict(record)


def _named(values: object) -> Mapping[str, Value]:
    is_flat = isinstance(values, dict) and all(
        isinstance(each, str | bool) or abs(_number(each)) < math.inf for each in values.values()
    )
    if not is_flat:
        raise ValueError("a configuration names the values of its parameters")
    return cast("Mapping[str, Value]", values)


def _is_word(text: object) -> bool:
    return isinstance(text, str) and _FAILURE.fullmatch(text) is not None


def _number(value: object) -> float:
    """Return the number, or NaN, for which every comparison is false."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
