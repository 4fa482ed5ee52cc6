"""TeamMemory: a team's measurements, and the one schedule that all its hosts use for a problem.

Both are stored as `schedule` artifacts: immutable, verified before use, withheld when reported.

    answer n         the best configurations, best first; jobs run the first one
    measurements n   measurements of one host, published while it searches; at most 64

A job finds an answer with one look-up. If there is none, a lease lets one host search while the
others wait. All ranks of a job get the same answer. A search starts with the measurements of all
hosts, and with the best configurations of the nearest problems.

Artifacts are never overwritten. If an answer stops working on a host, or the team has withheld it,
hosts request the answer with the next number, which another host may have published already.

The searching host has measured its answer itself. Other hosts accept an answer only if it is in
their own space. A search skips configurations that peers have measured. It is repeated without
peers' measurements if a peer's cost is far from the cost here, or if nothing works here.

Two limits remain. If a peer reports fast configurations as slow, or as failing although other
configurations work, no host tries them, except for a default that is reported as slow. A host that
may publish an answer chooses what the others run within their space.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from reprlib import repr as short
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

from graphstash._compile.cache import CompileCache, InFlightCompile, PackOutcome
from graphstash._compile.ranks import CompileTurn, CompileTurns, RankStore, no_op
from graphstash.config import holder_name
from graphstash.errors import CacheError, Reason
from graphstash.tuning.memory.findings import (
    MAX_MEASUREMENTS,
    MAX_RECORD_BYTES,
    Finding,
    merged,
    read,
    values_of,
)
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.space import Configuration, SearchSpace, Value
from graphstash_schema import ArtifactKey, ArtifactKind
from graphstash_schema.explanation import SCHEDULE_PART, SPEEDUP_PART, described
from graphstash_schema.listing import ArtifactQuery, ListOrder

__all__ = ["Fit", "Measure", "Schedule", "Search", "TeamMemory", "Tune"]

_log = logging.getLogger("graphstash")

_MAX_ANSWERS: Final = 8
"""Maximum answers to a problem: each replaces an answer that no longer works."""

_MAX_BATCHES: Final = 64
"""Maximum measurement artifacts of a problem. A search downloads all of them."""

_BATCH_COUNT: Final = 64
_BATCH_SECONDS: Final = 10.0
"""Publish the first artifact after this many measurements or seconds: a search may be killed. Later
artifacts wait for more, so that `_MAX_BATCHES` suffice for hours."""

_STEP: Final = 8
"""After this many artifacts, the number of measurements per artifact increases."""

_MAX_BEST: Final = 8
"""Maximum configurations in an answer: one to run, and starting points for other searches."""

_MAX_CLAIMS: Final = 32
"""Maximum configurations that a host measures only because peers report them as fast."""

_MAX_HOSTS: Final = 64
"""Maximum host names in an answer."""

_MAX_FINALISTS: Final = 4
_FINAL_ROUNDS: Final = 3
_MIN_SPREAD: Final = 0.01
"""Costs within this share of the best cost count as equal and are measured again."""

_MAX_COST_RATIO: Final = 4.0
"""Maximum credible ratio of a configuration's costs on equal hosts, under any load."""

_MAX_NEIGHBOURS: Final = 3
_MAX_LISTED: Final = 500
_NO_ANSWER: Final = b"{}"
"""The leader sends this to the other ranks if the stored answer is unusable or withheld."""

Measure: TypeAlias = Callable[[Configuration], Finding]
"""Measures one configuration on this host."""

Fit: TypeAlias = Callable[[Mapping[str, Value]], Configuration]
"""Maps a configuration of a similar problem to this space, or raises `ValueError`. The input comes
from other hosts. An error, or a result outside the space, gives no hint."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule to run.

    Attributes:
        best: measurements of the best configurations, best first.
        key: key of the artifact; None without a cache, or if all its answers were rejected.
        was_searched: whether this process has searched for the schedule.
    """

    best: tuple[Finding, ...]
    key: ArtifactKey | None
    was_searched: bool

    @property
    def configuration(self) -> Configuration:
        """The best configuration."""
        return self.best[0].configuration


class Search(NamedTuple):
    """The input of a search by this process.

    Attributes:
        known: measurements of all hosts, by configuration, which the search need not repeat.
        hints: starting points: the best configurations of the nearest problems, nearest first.
        publish: call it with each new measurement; it never raises or waits.
    """

    known: dict[Configuration, Finding]
    hints: Sequence[Configuration]
    publish: Callable[[Finding], None]


Tune: TypeAlias = Callable[[Search], None]
"""Searches until its budget is spent."""


class TeamMemory:
    """Finds the team's schedules, or searches for them; one per process. Thread-safe.

    Args:
        cache: finds and publishes artifacts.
        ranks: returns the store of the ranks that run the kernel; None for a single process.
        batch_count: measurements in the first artifact, at most 512.
    """

    def __init__(
        self,
        cache: CompileCache,
        *,
        ranks: Callable[[], RankStore | None] = lambda: None,
        batch_count: int = _BATCH_COUNT,
    ) -> None:
        self._cache = cache
        self._ranks = ranks
        self._batch_count = min(batch_count, MAX_MEASUREMENTS)
        self._turns = CompileTurns(cache)
        self._lock = threading.Lock()  # guards the field below
        self._rejected: dict[ArtifactKey, Configuration] = {}

    def schedule(
        self,
        problem: Problem,
        space: SearchSpace,
        tune: Tune,
        *,
        measure: Measure,
        confirm: Measure | None = None,
        fit: Fit | None = None,
    ) -> Schedule | None:
        """Return the team's schedule for a problem, or search for one if there is none.

        Cache errors are counted and never raised. Without the cache, the search starts without
        data, and its result stays on this host.

        Args:
            problem: what is tuned.
            space: the allowed configurations; the schedule is always in it.
            tune: searches. After an exception, which propagates, the next host may search. Called a
                second time, without peers' measurements, if these do not hold here.
            measure: measures finalists with nearly equal costs, and configurations that only other
                hosts measured.
            confirm: measures the best configuration in a new process before publication. If it
                fails, the next best is confirmed. Default: no confirmation.
            fit: see `Fit`. Default: accepts configurations of the space.

        Returns:
            None if no configuration works.
        """
        search = partial(
            self._search,
            problem=problem,
            space=space,
            tune=tune,
            measure=measure,
            confirm=confirm,
            fit=fit,
        )
        for number in range(_MAX_ANSWERS):
            request = problem.request(space, "answer", number, max_bytes=MAX_RECORD_BYTES)
            if request.key in self._rejected:
                continue
            found = self._turns.ask(request, self._ranks)
            if isinstance(found, bytes):
                if (best := self._read_answer(request.key, found, space)) is not None:
                    return Schedule(best, request.key, was_searched=False)
                continue
            if found.compilation is not None and self._is_taken(found.compilation):
                found.compilation.abandon()
                self._turns.announce(found, _NO_ANSWER)
                continue
            return search(found, request.key)
        self._cache.record_fallback(
            CacheError(Reason.REJECTED, f"none of {_MAX_ANSWERS} answers of {problem.label} works")
        )
        return search(CompileTurn(None, no_op), None)

    def find(self, problem: Problem, space: SearchSpace) -> Schedule | None:
        """Return an existing schedule without waiting for a search; it does not count as a hit.

        Return None if there is none, and always in a job of several ranks, which must agree in
        `schedule`.
        """
        try:
            if self._ranks() is not None:
                return None
        except Exception as error:  # noqa: BLE001 - tuning's outermost frame: training continues
            self._cache.record_fallback(CacheError(Reason.RANKS, repr(error)))
            return None
        for number in range(_MAX_ANSWERS):
            key = problem.request(space, "answer", number, max_bytes=MAX_RECORD_BYTES).key
            if key in self._rejected:
                continue
            pack = self._cache.fetch_pack(key, max_bytes=MAX_RECORD_BYTES)
            if pack is None and self._is_withheld(key):
                continue
            payload = None if pack is None else pack.payload
            best = None if payload is None else self._read_answer(key, payload, space)
            return None if best is None else Schedule(best, key, was_searched=False)
        return None

    def reject(self, schedule: Schedule, failure: str) -> None:
        """Count a schedule that does not work here, so that `schedule` uses the next answer."""
        if schedule.key is not None:
            with self._lock:
                self._rejected[schedule.key] = schedule.configuration
            self._cache.reject(schedule.key, failure)

    def _is_taken(self, compilation: InFlightCompile) -> bool:
        """Return whether the server would refuse a new answer under the key."""
        if not compilation.is_wanted:  # the stored answer does not verify
            return True
        return compilation.fallback_reason is None and self._is_withheld(compilation.key)

    def _is_withheld(self, key: ArtifactKey) -> bool:
        """Return whether the server withholds the answer under the key."""
        server = self._cache.stash.server
        if not server.is_configured:
            return False
        try:
            return any(each.key == key for each in server.lookup([key]).withdrawn)
        except CacheError as error:
            self._cache.record_fallback(error)
            return False

    def _read_answer(
        self, key: ArtifactKey, payload: bytes, space: SearchSpace
    ) -> tuple[Finding, ...] | None:
        try:
            best = tuple(read(payload, space))
        except ValueError as error:
            if payload != _NO_ANSWER:
                self._cache.reject(key, f"{key} is no answer: {error}")
            return None
        if best[0].cost is None:
            self._cache.reject(key, f"{key} is no answer: its first configuration does not work")
            return None
        return best

    def _search(
        self,
        turn: CompileTurn,
        key: ArtifactKey | None,
        *,
        problem: Problem,
        space: SearchSpace,
        tune: Tune,
        measure: Measure,
        confirm: Measure | None,
        fit: Fit | None,
    ) -> Schedule | None:
        best_of = partial(_best, measure=measure, confirm=confirm)
        started = monotonic()
        journal = _Journal(self._cache, problem, space, batch_count=self._batch_count)
        payload: bytes | None = None
        try:
            known = journal.read()
            for configuration in self._rejected_of(space):
                known[configuration] = Finding(configuration, None, failure="compile")
                journal.add(known[configuration])
            hints = self._hints(problem, space, fit or space.configuration)
            tune(Search(dict(known), hints, journal.add))
            _measure_default(known, journal, space, measure)
            best = best_of(journal, known)
            if _is_misled(best, _own(journal), known):
                _log.warning(
                    "%s: other hosts' measurements do not hold here; searching without them",
                    problem.label,
                )
                tune(Search(_own(journal), hints, journal.add))
                best = best_of(journal, {})
            if best:
                if turn.compilation is not None:
                    found = _described(best[0], journal, space)
                    self._cache.log.add_parts(turn.compilation.key, found)
                payload = _answer(best, known, journal, problem, space)
        finally:
            journal.flush()
            if payload is None and turn.compilation is not None:
                turn.compilation.abandon()
            self._turns.announce(turn, payload)
        if payload is None:
            return None
        if turn.compilation is not None:
            turn.compilation.publish_bytes(payload, compile_seconds=monotonic() - started)
            cache = self._cache  # other hosts find the answer by its label, so send it now
            cache.publisher.submit(lambda: cache.log.send(cache.stash.server))
        return Schedule(best, key, was_searched=True)

    def _rejected_of(self, space: SearchSpace) -> Collection[Configuration]:
        with self._lock:
            return [each for each in self._rejected.values() if each in space]

    def _hints(self, problem: Problem, space: SearchSpace, fit: Fit) -> list[Configuration]:
        hints: dict[Configuration, None] = {}
        for key in self._nearest(problem):
            pack = self._cache.fetch_pack(key, max_bytes=MAX_RECORD_BYTES)
            if pack is None or pack.payload is None:
                continue
            try:
                found = values_of(pack.payload)
            except ValueError as error:
                self._cache.record_fallback(CacheError(Reason.CORRUPT, f"{key}: {error}"))
                continue
            for values in found[:_MAX_BEST]:
                try:
                    hint = fit(values)
                    if hint in space and space.has_types(hint):
                        hints[hint] = None
                except Exception as error:  # noqa: BLE001 - the caller's code, on peers' values
                    _log.debug("%s: %s does not fit: %s", problem.label, key, short(error))
        return list(hints)

    def _nearest(self, problem: Problem) -> list[ArtifactKey]:
        server = self._cache.stash.server
        if not server.is_configured:
            return []
        query = ArtifactQuery(
            kind=ArtifactKind.SCHEDULE,
            label=problem.family,
            order=ListOrder.NEWEST,
            limit=_MAX_LISTED,
        )
        try:
            listed = server.list_artifacts(query).artifacts
        except CacheError as error:
            self._cache.record_fallback(error)
            return []
        distances = {
            each.key: distance
            for each in listed
            if each.key.kind is ArtifactKind.SCHEDULE
            and (distance := problem.distance(each.label, each.key.device_type)) is not None
        }
        return sorted(distances, key=lambda key: distances[key])[:_MAX_NEIGHBOURS]


class _Journal:
    """Reads the stored measurements of one problem, and publishes those of this process."""

    def __init__(
        self, cache: CompileCache, problem: Problem, space: SearchSpace, *, batch_count: int
    ) -> None:
        self.own: list[Finding] = []
        self._cache = cache
        self._space = space
        self._requests = [
            problem.request(space, "measurements", number, max_bytes=MAX_RECORD_BYTES)
            for number in range(_MAX_BATCHES)
        ]
        self._batch_count = batch_count
        self._lock = threading.Lock()  # guards the fields below
        self._next = 0  # number of the first artifact that may be absent
        self._pending: list[Finding] = []
        self._since = monotonic()

    def read(self) -> dict[Configuration, Finding]:
        batches = []
        stored = self._stored()
        for key in stored:
            pack = self._cache.fetch_pack(key, max_bytes=MAX_RECORD_BYTES)
            if pack is None or pack.payload is None:
                continue
            try:
                batches.append(read(pack.payload, self._space))
            except ValueError as error:
                self._cache.record_fallback(CacheError(Reason.CORRUPT, f"{key}: {error}"))
        absent = (n for n, each in enumerate(self._requests) if each.key not in stored)
        self._next = next(absent, _MAX_BATCHES)
        return merged(batches)

    def add(self, measurement: Finding) -> None:
        with self._lock:
            self.own.append(measurement)
            self._pending.append(measurement)
            count = min(self._batch_count * (1 + self._next // _STEP), MAX_MEASUREMENTS)
            seconds = _BATCH_SECONDS * (1 + self._next)
            is_due = len(self._pending) >= count or monotonic() - self._since >= seconds
        if is_due:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
            seconds, self._since = monotonic() - self._since, monotonic()
        if pending and not self._cache.publisher.submit(lambda: self._publish(pending, seconds)):
            self._cache.record_fallback(
                CacheError(Reason.QUEUE_FULL, "too many artifacts wait for their upload")
            )

    def _stored(self) -> Collection[ArtifactKey]:
        """Return keys of the artifacts on this host or in a namespace that this job reads."""
        keys = [each.key for each in self._requests]
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
        return sorted(found, key=keys.index)

    def _publish(self, pending: Sequence[Finding], seconds: float) -> None:
        payload = _encoded(
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
            request = self._requests[self._next]
            self._next += 1
            metadata = request.metadata(compile_seconds=seconds, raw_size_bytes=len(payload))
            outcome = self._cache.store_pack(request.key, payload, metadata, artifact_count=1)
            if outcome is PackOutcome.TAKEN:
                continue
            if outcome is not PackOutcome.STORED:
                self._next -= 1
            else:
                with suppress(CacheError):  # the artifact is stored without a description
                    name = described(request.key, request.label, request.parts)
                    self._cache.stash.server.describe([name])
            return
        self._cache.record_fallback(
            CacheError(Reason.TOO_LARGE, f"{_MAX_BATCHES} artifacts have measurements already")
        )


def _best(
    journal: _Journal,
    known: Mapping[Configuration, Finding],
    *,
    measure: Measure,
    confirm: Measure | None,
) -> tuple[Finding, ...]:
    """Return this host's measurements of the best configurations, best first.

    Peers' costs are not trusted: in the order of these costs, measure the configurations here until
    the best cost here is below the next one. Then measure nearly equal configurations again, in
    turn, and confirm the best configuration.
    """
    for claim in _ranked(known)[:_MAX_CLAIMS]:
        own = _own(journal)
        if claim.configuration in own:
            continue
        if (here := _ranked(own)) and _cost(here[0]) < _cost(claim):
            break
        journal.add(measure(claim.configuration))
    finalists = _finalists(_ranked(_own(journal)))
    for _ in range(_FINAL_ROUNDS if len(finalists) > 1 else 0):
        for each in finalists:
            journal.add(measure(each.configuration))
    confirmed: set[Configuration] = set()
    while confirm and (best := _ranked(_own(journal))) and best[0].configuration not in confirmed:
        journal.add(confirm(best[0].configuration))
        confirmed.add(best[0].configuration)
    return tuple(_ranked(_own(journal))[:_MAX_BEST])


def _is_misled(
    best: Sequence[Finding],
    own: Mapping[Configuration, Finding],
    known: Mapping[Configuration, Finding],
) -> bool:
    """Return whether to repeat a search that skipped configurations because of peers' measurements.

    True if nothing works here, or if a cost here is far from the peers' cost.
    """
    if not known.keys() - own.keys():
        return False
    pairs = [(_cost(own[key]), _cost(known[key])) for key in own.keys() & known.keys()]
    return not best or any(
        max(here, there) > _MAX_COST_RATIO * min(here, there)
        for here, there in pairs
        if here < math.inf and there < math.inf
    )


def _finalists(ranked: Sequence[Finding]) -> Sequence[Finding]:
    """Return the configurations whose cost is indistinguishable from the best cost."""
    if not ranked:
        return ()
    limit = _cost(ranked[0]) + max(ranked[0].spread, _MIN_SPREAD * _cost(ranked[0]))
    return [each for each in ranked if _cost(each) <= limit][:_MAX_FINALISTS]


def _own(journal: _Journal) -> dict[Configuration, Finding]:
    """Return this host's measurements, merged by configuration, or the last one if that failed.

    Earlier measurements may have been made in a process that other trials had changed.
    """
    last = {each.configuration: each for each in journal.own}
    failed = {key: each for key, each in last.items() if each.cost is None}
    return merged([journal.own]) | failed


def _ranked(measurements: Mapping[Configuration, Finding]) -> list[Finding]:
    return sorted((each for each in measurements.values() if each.cost is not None), key=_cost)


def _cost(measurement: Finding) -> float:
    return measurement.cost if measurement.cost is not None else float("inf")


def _measure_default(
    known: Mapping[Configuration, Finding],
    journal: _Journal,
    space: SearchSpace,
    measure: Measure,
) -> None:
    """Measure `space.start` unless the search has, or it failed on another host. Pages compare the
    answer with it, and it is the answer if it is the fastest.
    """
    peer = known.get(space.start)
    if space.start in _own(journal) or (peer is not None and peer.failure is not None):
        return
    try:
        journal.add(measure(space.start))
    except Exception:  # noqa: BLE001 - the search may have an answer, which must not be lost
        _log.debug("the default was not measured", exc_info=True)


def _described(best: Finding, journal: _Journal, space: SearchSpace) -> dict[str, str]:
    """Return what pages show of an answer: the configuration, and its speedup over the default."""
    values = space.named(best.configuration).items()
    parts = {SCHEDULE_PART: " ".join(f"{name}={value}" for name, value in values)}
    start = _own(journal).get(space.start)
    if start is not None and start.cost is not None:
        parts[SPEEDUP_PART] = f"{start.cost / _cost(best):.2f}"
    return parts


def _answer(
    best: Sequence[Finding],
    known: Mapping[Configuration, Finding],
    journal: _Journal,
    problem: Problem,
    space: SearchSpace,
) -> bytes:
    """Return the answer to publish, with as many configurations as fit into an artifact.

    Hosts use only `measurements`; the other fields are for display.
    """
    hosts = {_this_host()}.union(*(each.hosts for each in known.values()))
    answer = _encoded(
        {
            "problem": problem.label,
            "compiler": problem.compiler,
            "hosts": sorted(hosts)[:_MAX_HOSTS],
            "measured": len({each.configuration for each in journal.own} | known.keys()),
            "measurements": [each.named(space).to_json() for each in best],
        }
    )
    if len(answer) > MAX_RECORD_BYTES and len(best) > 1:
        return _answer(best[: len(best) // 2], known, journal, problem, space)
    return answer


def _this_host() -> str:
    """Return `user@host`: the lease holder's name without the process ID."""
    return holder_name().rpartition(":")[0]


def _encoded(record: Mapping[str, Any]) -> bytes:
    # `default` converts numpy numbers, which a searcher may use.
    plain = json.dumps(record, sort_keys=True, allow_nan=False, default=lambda each: each.item())
    return plain.encode()
