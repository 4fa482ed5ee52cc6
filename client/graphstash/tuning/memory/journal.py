"""Journal of a search on one host: the measurements of a problem, and the choice of the best.

It holds the measurements that the team has stored and the measurements of this host. It publishes
the latter during the search.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from time import monotonic
from typing import Any, Final, TypeAlias

from graphstash._compile.cache import CompileCache, PackOutcome
from graphstash._compile.request import CompileRequest
from graphstash.config import holder_name
from graphstash.errors import CacheError, Reason
from graphstash.tuning.measuring.race import Race
from graphstash.tuning.memory.findings import (
    MAX_MEASUREMENTS,
    MAX_RECORD_BYTES,
    Finding,
    merge,
    read,
)
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.space import Configuration, SearchSpace
from graphstash_schema import ArtifactKey
from graphstash_schema.explanation import SCHEDULE_PART, SPEEDUP_PART, make_description

__all__ = ["MAX_BEST", "Journal", "Measure", "in_turns"]

_log = logging.getLogger("graphstash")

_BATCH_COUNT: Final = MAX_MEASUREMENTS
_BATCH_SECONDS: Final = 8.0
"""Publish pending measurements when there are this many, or this many seconds after the first one.
An upload takes up to two seconds, so a killed search loses the measurements of at most ten seconds.
"""

_MAX_BATCHES: Final = 16384
"""Maximum measurement artifacts of a problem: 36 hours of searching."""

_LOOKUP_COUNT: Final = 64
"""Artifacts in a look-up. A search looks up the next ones until none of them is stored."""

_MAX_READ_BYTES: Final = 64 * 1024**2
"""Bytes of measurements after which a search reads no further artifact; about 400,000 measurements.
Otherwise a peer could make every search download gigabytes."""

MAX_BEST: Final = 8
"""Maximum configurations in an answer: one to run, and starting points for other searches."""

_MAX_CLAIMS: Final = 32
"""Maximum configurations that a host measures only because peers report them as fast."""

_MAX_HOSTS: Final = 64
"""Maximum host names in an answer."""

_MAX_FINALISTS: Final = 4
_MAX_ROUNDS: Final = 12
"""Maximum measurements of a finalist in turns; 7 to 9 of them can prove a difference."""

_MIN_SPREAD: Final = 0.01
"""Costs within this share of the best cost count as equal and are measured again."""

_MAX_COST_RATIO: Final = 4.0
"""Maximum credible ratio of a configuration's costs on equal hosts, under any load."""

Measure: TypeAlias = Callable[[Sequence[Configuration]], Sequence[Finding]]
"""Measures configurations on this host, in turns if there are several, so that their costs are
comparable."""


def in_turns(measure: Callable[[Configuration], Finding]) -> Measure:
    """Return a function that measures several configurations in turns, until one is proven the
    cheapest or each was measured `_MAX_ROUNDS` times. See `Race`.
    """

    def measure_all(configurations: Sequence[Configuration]) -> list[Finding]:
        found: dict[int, Finding] = {}
        race = Race(len(configurations))
        while race.continues(least=1, most=_MAX_ROUNDS):
            for number in race.running:
                found[number] = measure(configurations[number])
            race.end_round({number: found[number].cost for number in race.running})
        for number, each in found.items():
            if each.cost is not None:
                costs = race.costs(number)
                found[number] = replace(each, cost=median(costs), count=len(costs))
        return [found[number] for number in sorted(found)]

    return measure_all


class Journal:
    """The measurements of one problem during a search on this host.

    Attributes:
        known: measurements of all hosts, by configuration, since `read`.
    """

    def __init__(
        self, cache: CompileCache, problem: Problem, space: SearchSpace, measure: Measure
    ) -> None:
        self.known: dict[Configuration, Finding] = {}
        self._cache = cache
        self._problem = problem
        self._space = space
        self._measure = measure
        self._measured: list[Finding] = []
        self._next = 0  # number of the first artifact that may be absent
        self._lock = threading.Lock()  # guards the fields below
        self._pending: list[Finding] = []
        self._since = monotonic()
        self._timer: threading.Timer | None = None

    # --- the team's artifacts

    def read(self) -> None:
        """Set `known`. Errors of the cache are counted."""
        batches = []
        left = _MAX_READ_BYTES
        for key in self._find_stored():
            pack = self._cache.fetch_pack(key, max_bytes=MAX_RECORD_BYTES) if left > 0 else None
            if pack is None or pack.payload is None:
                continue
            left -= len(pack.payload)
            try:
                batches.append(read(pack.payload, self._space))
            except ValueError as error:
                self._cache.record_fallback(CacheError(Reason.CORRUPT, f"{key}: {error}"))
        self.known = merge(batches)

    def add(self, measurement: Finding) -> None:
        """Add a measurement of this host, and publish it soon. Never raises or waits."""
        with self._lock:
            self._measured.append(measurement)
            self._pending.append(measurement)
            is_due = len(self._pending) >= _BATCH_COUNT
            if self._timer is None:
                self._since = monotonic()
                # Not at the next measurement, which may take minutes or never come.
                self._timer = threading.Timer(_BATCH_SECONDS, self.flush)
                self._timer.daemon = True
                self._timer.start()
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Publish the pending measurements in the background."""
        with self._lock:
            pending, self._pending = self._pending, []
            seconds = monotonic() - self._since
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if pending:
            self._cache.publish_later(lambda: self._publish(pending, seconds))

    def _find_stored(self) -> Iterator[ArtifactKey]:
        """Yield keys of the artifacts on this host or in a namespace that this job reads, and set
        `_next`.
        """
        self._next = _MAX_BATCHES
        for start in range(0, _MAX_BATCHES, _LOOKUP_COUNT):
            numbers = range(start, min(start + _LOOKUP_COUNT, _MAX_BATCHES))
            keys = [self._request(number).key for number in numbers]
            found = self._look_up(keys)
            for number, key in zip(numbers, keys, strict=True):
                if key in found:
                    yield key
                else:
                    self._next = min(self._next, number)
            if not found:
                return

    def _look_up(self, keys: Sequence[ArtifactKey]) -> Collection[ArtifactKey]:
        found = {key for key in keys if self._cache.is_on_this_host(key)}
        server = self._cache.stash.server
        if not server.is_configured:
            return found
        for namespace in self._cache.config.readable:
            try:
                reply = server.lookup(keys, namespace=namespace)
            except CacheError as error:
                self._cache.record_fallback(error)
                break
            found |= {each.key for each in reply.found} & set(keys)
        return found

    def _request(self, number: int) -> CompileRequest:
        return self._problem.request(
            self._space, "measurements", number, max_bytes=MAX_RECORD_BYTES
        )

    def _publish(self, pending: Sequence[Finding], seconds: float) -> None:
        payload = _encode(
            {
                "host": _this_host(),
                "measurements": [each.named(self._space).to_json() for each in pending],
            }
        )
        if len(payload) > MAX_RECORD_BYTES and len(pending) > 1:
            half = len(pending) // 2
            for part in (pending[:half], pending[half:]):
                self._publish(part, seconds * len(part) / len(pending))
            return
        while self._next < _MAX_BATCHES:
            request = self._request(self._next)
            metadata = request.metadata(compile_seconds=seconds, raw_size_bytes=len(payload))
            outcome = self._cache.store_pack(request.key, payload, metadata, artifact_count=1)
            # If only this host stores the artifact, a later job uploads it. Its number is used.
            is_used = outcome in {PackOutcome.TAKEN, PackOutcome.STORED}
            self._next += is_used or self._cache.is_on_this_host(request.key)
            if outcome is PackOutcome.TAKEN:
                continue
            if outcome is PackOutcome.STORED:
                with suppress(CacheError):  # the artifact is stored without a description
                    name = make_description(request.key, request.label, request.parts)
                    self._cache.stash.server.describe([name])
            return
        self._cache.record_fallback(
            CacheError(Reason.TOO_LARGE, f"{_MAX_BATCHES} artifacts have measurements already")
        )

    # --- this host's conclusions

    def own(self) -> dict[Configuration, Finding]:
        """Return this host's measurements by configuration: merged, or the last one if it failed.

        Earlier measurements may have been made in a process that other trials had changed.
        """
        last = {each.configuration: each for each in self._measured}
        failed = {key: each for key, each in last.items() if each.cost is None}
        return merge([self._measured]) | failed

    def measure_default(self) -> None:
        """Measure `space.start` unless the search has, or it failed on another host. Pages compare
        the answer with it, and it is the answer if it is the fastest.
        """
        start = self._space.start
        peer = self.known.get(start)
        if start in self.own() or (peer is not None and peer.failure is not None):
            return
        try:
            self._measure_here([start])
        except Exception:  # noqa: BLE001 - the search may have an answer, which must not be lost
            _log.debug("the default was not measured", exc_info=True)

    def find_best(
        self, claims: Mapping[Configuration, Finding], *, confirm: bool
    ) -> tuple[Finding, ...]:
        """Return this host's measurements of the best configurations, best first.

        Peers' costs are not trusted: in the order of these `claims`, measure the configurations
        here until the best cost here is below the next one. Then compare those with nearly equal
        costs. With `confirm`, measure the best configuration once more.
        """
        for claim in _rank(claims)[:_MAX_CLAIMS]:
            own = self.own()
            if claim.configuration in own:
                continue
            if (here := _rank(own)) and _cost(here[0]) < _cost(claim):
                break
            self._measure_here([claim.configuration])
        finalists = [each.configuration for each in _choose_finalists(_rank(self.own()))]
        compared = self._measure_here(finalists) if len(finalists) > 1 else {}
        confirmed: set[Configuration] = set()
        while True:
            own = self.own()
            working = {key: each for key, each in compared.items() if own[key].cost is not None}
            rest = [each for each in _rank(own) if each.configuration not in working]
            ranked = _rank(working) + rest
            if not (confirm and ranked) or ranked[0].configuration in confirmed:
                return tuple(ranked[:MAX_BEST])
            confirmed.add(ranked[0].configuration)
            self._measure_here([ranked[0].configuration])

    def _measure_here(
        self, configurations: Sequence[Configuration]
    ) -> dict[Configuration, Finding]:
        found = self._measure(configurations)
        for each in found:
            self.add(each)
        return {each.configuration: each for each in found}

    def is_misled(self, best: Sequence[Finding]) -> bool:
        """Return whether to repeat a search that skipped configurations because of peers.

        True if nothing works here, or if a cost here is far from the peers' cost.
        """
        own, known = self.own(), self.known
        if not known.keys() - own.keys():
            return False
        pairs = [(_cost(own[key]), _cost(known[key])) for key in own.keys() & known.keys()]
        return not best or any(
            max(here, there) > _MAX_COST_RATIO * min(here, there)
            for here, there in pairs
            if here < math.inf and there < math.inf
        )

    def display_parts(self, best: Finding) -> dict[str, str]:
        """Return what pages show of an answer: configuration, and speedup over the default."""
        values = self._space.named(best.configuration).items()
        parts = {SCHEDULE_PART: " ".join(f"{name}={value}" for name, value in values)}
        start = self.own().get(self._space.start)
        if start is not None and start.cost is not None:
            parts[SPEEDUP_PART] = f"{start.cost / _cost(best):.2f}"
        return parts

    def encode_answer(self, best: Sequence[Finding]) -> bytes:
        """Return the answer to publish, with as many configurations as fit into an artifact.

        Hosts use only `measurements`; the other fields are for display.
        """
        hosts = {_this_host()}.union(*(each.hosts for each in self.known.values()))
        answer = _encode(
            {
                "problem": self._problem.label,
                "compiler": self._problem.compiler,
                "hosts": sorted(hosts)[:_MAX_HOSTS],
                "measured": len(self.own().keys() | self.known.keys()),
                "measurements": [each.named(self._space).to_json() for each in best],
            }
        )
        if len(answer) > MAX_RECORD_BYTES and len(best) > 1:
            return self.encode_answer(best[: len(best) // 2])
        return answer


def _choose_finalists(ranked: Sequence[Finding]) -> Sequence[Finding]:
    """Return the configurations whose cost is indistinguishable from the best cost."""
    if not ranked:
        return ()
    limit = _cost(ranked[0]) + max(ranked[0].spread, _MIN_SPREAD * _cost(ranked[0]))
    return [each for each in ranked if _cost(each) <= limit][:_MAX_FINALISTS]


def _rank(measurements: Mapping[Configuration, Finding]) -> list[Finding]:
    return sorted((each for each in measurements.values() if each.cost is not None), key=_cost)


def _cost(measurement: Finding) -> float:
    return measurement.cost if measurement.cost is not None else float("inf")


def _this_host() -> str:
    """Return `user@host`: the lease holder's name without the process ID."""
    return holder_name().rpartition(":")[0]


def _encode(record: Mapping[str, Any]) -> bytes:
    # `default` converts numpy numbers, which a searcher may use.
    plain = json.dumps(record, sort_keys=True, allow_nan=False, default=lambda each: each.item())
    return plain.encode()
