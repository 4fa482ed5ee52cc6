"""Findings: measurements of configurations, by one host or merged over hosts.

Other hosts wrote this data. `read` accepts JSON of bounded size, checks every number, and rejects
configurations outside of the searched space.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles
from typing import Any, Final, NamedTuple, TypeAlias, cast

from graphstash.tuning.measuring.measurement import FIELDS, Measurement, named_values
from graphstash.tuning.space import Configuration, SearchSpace, Value
from graphstash_schema.names import printable

__all__ = [
    "MAX_MEASUREMENTS",
    "MAX_RECORD_BYTES",
    "WRONG",
    "Answer",
    "Finding",
    "merge",
    "read",
    "read_answer",
    "values_of",
]

MAX_RECORD_BYTES: Final = 256 * 1024
"""Maximum bytes of an artifact."""

MAX_MEASUREMENTS: Final = 512
"""Maximum measurements in an artifact."""

WRONG: Final = "wrong"
"""Failure of a configuration that gave a wrong result."""

_MAX_COUNT: Final = 10**6
_MAX_MEASURED: Final = 10**12
_HOST_CHARACTERS: Final = 128

Finding: TypeAlias = Measurement[Configuration]
"""A measurement whose configuration is a tuple, as in a `SearchSpace`."""


class Answer(NamedTuple):
    """An answer for display. Its configurations are not checked against a space.

    Attributes:
        compiler: name and version.
        hosts: names of the hosts that measured.
        measured: number of distinct configurations that hosts measured.
        best: measurement of the best configuration, as `Measurement.to_json` returns it.
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
    record = _parse(payload)
    first = record["measurements"][0]
    # A later release may add fields.
    known = {name: first.get(name) for name in FIELDS} if isinstance(first, dict) else first
    best = Measurement.from_json(known)
    hosts, measured = record.get("hosts"), record.get("measured")
    is_count = type(measured) is int and 0 <= measured <= _MAX_MEASURED
    if not isinstance(hosts, list) or not is_count:
        raise ValueError("it lacks the hosts or the number of measured configurations")
    return Answer(
        compiler=printable(str(record.get("compiler", "")), most=_HOST_CHARACTERS),
        hosts=tuple(printable(str(each), most=_HOST_CHARACTERS) for each in hosts),
        measured=cast("int", measured),
        best=best.to_json(),
    )


def read(payload: bytes, space: SearchSpace) -> list[Finding]:
    """Return the measurements of an artifact.

    Raises:
        ValueError: the artifact has no measurements, too many, or an invalid one.
    """
    record = _parse(payload)
    host = record.get("host")
    hosts = frozenset({printable(host, most=_HOST_CHARACTERS)} if isinstance(host, str) else ())
    named = [Measurement.from_json(each, hosts=hosts) for each in record["measurements"]]
    found = [each.within(space) for each in named]
    for each in found:  # 1, 1.0 and true are equal, but only one of them is in the space
        if not space.has_types(each.configuration):
            raise ValueError(
                f"{each.configuration!r} does not have the types of the space's values"
            )
    return found


def values_of(payload: bytes) -> list[Mapping[str, Value]]:
    """Return the configurations in another space's artifact; checks only their form.

    Raises:
        ValueError: the artifact is malformed.
    """
    records = _parse(payload)["measurements"]
    return [
        named_values(each.get("configuration") if isinstance(each, dict) else None)
        for each in records
    ]


def merge(batches: Iterable[Sequence[Finding]]) -> dict[Configuration, Finding]:
    """Merge the measurements of all hosts, by configuration.

    Each host counts once, so a host that measures often cannot outvote the others: the cost is the
    median of the hosts' costs. A host's cost is the cost of its measurement with the most samples,
    for example in a finalists' round. If several have the most samples, it is their median.

    The spread is the median of all spreads, or the interquartile range of the hosts' costs if that
    is larger. A configuration that works on any host works: a failure may be specific to a host. A
    configuration with a wrong result on any host is wrong: other hosts may have been lucky.
    """
    by_configuration: defaultdict[Configuration, list[Finding]] = defaultdict(list)
    for batch in batches:
        for each in batch:
            by_configuration[each.configuration].append(each)
    return {key: _merge_configuration(found) for key, found in by_configuration.items()}


def _merge_configuration(found: Sequence[Finding]) -> Finding:
    wrong = [each for each in found if each.failure == WRONG]
    working = wrong or [each for each in found if each.cost is not None] or found
    together = replace(
        working[0],
        count=min(sum(each.count for each in working), _MAX_COUNT),
        hosts=frozenset().union(*(each.hosts for each in working)),
    )
    by_host: defaultdict[frozenset[str], list[Finding]] = defaultdict(list)
    for each in working:
        if each.cost is not None:
            by_host[each.hosts].append(each)
    if len(working) == 1 or not by_host:
        return together
    costs = [_cost_of_host(of_host) for of_host in by_host.values()]
    low, _, high = quantiles(costs, n=4, method="inclusive") if len(costs) > 1 else costs * 3
    spread = max(median(each.spread for each in working), high - low)
    return replace(together, cost=median(costs), spread=spread)


def _cost_of_host(found: Sequence[Finding]) -> float:
    most = max(each.count for each in found)
    return median(each.cost for each in found if each.count == most and each.cost is not None)


def _parse(payload: bytes) -> dict[str, Any]:
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
