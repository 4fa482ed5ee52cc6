"""TeamMemory: a team's measurements, and the one schedule that all its hosts use for a problem.

Both are stored as `schedule` artifacts: immutable, verified before use, withheld when reported.

    answer n         the best configurations, best first; jobs run the first one
    measurements n   measurements of one host, published within seconds while it searches

A job finds an answer with one look-up. If there is none, a lease lets one host search while the
others wait. All ranks of a job get the same answer. A search starts with the measurements of all
hosts, and with the best configurations of the nearest problems.

Artifacts are never overwritten. If an answer stops working on a host, or the team has withheld it,
hosts request the answer with the next number, which another host may have published already.

The searching host has measured its answer itself. Other hosts accept an answer only if it is in
their own space. A search skips configurations that peers have measured. It is repeated without
peers' measurements if a peer's cost is far from the cost here, or if nothing works here.

Two limits remain. If a peer reports a fast configuration as slow or failing, and others work, no
host tries it. Only the default is measured even if it is reported as slow. A host that may publish
an answer chooses what the others run within their space.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from time import monotonic
from typing import Final, NamedTuple, TypeAlias

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash._compile.ranks import CompileTurn, CompileTurns, RankStore, no_op
from graphstash.errors import CacheError, Reason
from graphstash.tuning.memory.findings import MAX_RECORD_BYTES, Finding, read, values_of
from graphstash.tuning.memory.journal import MAX_BEST, Journal, Measure
from graphstash.tuning.memory.problem import Problem
from graphstash.tuning.space import Configuration, SearchSpace, Value
from graphstash_schema import ArtifactKey, ArtifactKind
from graphstash_schema.listing import ArtifactQuery, ListOrder

__all__ = ["Fit", "Measure", "Schedule", "Search", "TeamMemory", "Tune"]

_log = logging.getLogger("graphstash")

_MAX_ANSWERS: Final = 8
"""Maximum answers to a problem. Each further answer replaces one that does not work."""

_MAX_NEIGHBOURS: Final = 3
_MAX_LISTED: Final = 500
_NO_ANSWER: Final = b"{}"
"""The leader sends this to the other ranks if the stored answer is unusable or withheld."""

Fit: TypeAlias = Callable[[Mapping[str, Value]], Configuration]
"""Maps a configuration of a similar problem to this space, or raises `ValueError`. The input comes
from other hosts. An error, or a result outside the space, gives no hint."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule to run.

    Attributes:
        best: measurements of the best configurations, best first.
        key: key of the answer; None if all `_MAX_ANSWERS` answers are unusable.
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


class _SearchArguments(NamedTuple):
    problem: Problem
    space: SearchSpace
    tune: Tune
    measure: Measure
    confirm: bool
    fit: Fit


class TeamMemory:
    """Finds the team's schedules, or searches for them; one per process. Thread-safe. `ranks` gives
    the store of the ranks that run the kernel, or None for a single process.
    """

    def __init__(
        self, cache: CompileCache, *, ranks: Callable[[], RankStore | None] = lambda: None
    ) -> None:
        self._cache = cache
        self._ranks = ranks
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
        confirm: bool = False,
        fit: Fit | None = None,
    ) -> Schedule | None:
        """Return the team's schedule for a problem, or search for one if there is none.

        Cache errors are counted and never raised. Without the cache, the search starts without
        data, and its result stays on this host. None: no configuration works.

        Args:
            problem: what is tuned.
            space: the allowed configurations; the schedule is always in it.
            tune: searches. After an exception, which propagates, the next host may search. Called a
                second time, without peers' measurements, if these do not hold here.
            measure: compares finalists with nearly equal costs, and measures configurations that
                only other hosts measured.
            confirm: whether to measure the best configuration once more before publication. If it
                fails, the next best is confirmed.
            fit: see `Fit`. Default: accepts configurations of the space.
        """
        arguments = _SearchArguments(
            problem, space, tune, measure, confirm, fit or space.configuration
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
            return self._search(found, request.key, arguments)
        self._cache.record_fallback(
            CacheError(Reason.REJECTED, f"none of {_MAX_ANSWERS} answers of {problem.label} works")
        )
        return self._search(CompileTurn(None, no_op), None, arguments)

    def find(self, problem: Problem, space: SearchSpace) -> Schedule | None:
        """Return an existing schedule without waiting for a search. It does not count as a hit. In
        a job of several ranks, return None, because only `schedule` makes all ranks agree.
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
        self, turn: CompileTurn, key: ArtifactKey | None, arguments: _SearchArguments
    ) -> Schedule | None:
        started = monotonic()
        space, tune = arguments.space, arguments.tune
        journal = Journal(self._cache, arguments.problem, space, arguments.measure)
        payload: bytes | None = None
        try:
            journal.read()
            for configuration in self._rejected_of(space):
                failed = Finding(configuration, None, failure="compile")
                journal.known[configuration] = failed
                journal.add(failed)
            hints = self._fetch_hints(arguments)
            tune(Search(dict(journal.known), hints, journal.add))
            journal.measure_default()
            best = journal.find_best(journal.known, confirm=arguments.confirm)
            if journal.is_misled(best):
                _log.warning(
                    "%s: other hosts' measurements do not hold here; searching without them",
                    arguments.problem.label,
                )
                tune(Search(journal.own(), hints, journal.add))
                best = journal.find_best({}, confirm=arguments.confirm)
            if best:
                if turn.compilation is not None:
                    parts = journal.display_parts(best[0])
                    self._cache.log.add_parts(turn.compilation.key, parts)
                payload = journal.encode_answer(best)
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

    def _fetch_hints(self, arguments: _SearchArguments) -> list[Configuration]:
        hints: dict[Configuration, None] = {}
        for key in self._find_nearest(arguments.problem):
            pack = self._cache.fetch_pack(key, max_bytes=MAX_RECORD_BYTES)
            if pack is None or pack.payload is None:
                continue
            try:
                found = values_of(pack.payload)
            except ValueError as error:
                self._cache.record_fallback(CacheError(Reason.CORRUPT, f"{key}: {error}"))
                continue
            for values in found[:MAX_BEST]:
                try:
                    hint = arguments.fit(values)
                    if hint in arguments.space and arguments.space.has_types(hint):
                        hints[hint] = None
                except Exception as error:  # noqa: BLE001 - the caller's code, on peers' values
                    _log.debug(
                        "%s: %s does not fit: %s", arguments.problem.label, key, short(error)
                    )
        return list(hints)

    def _find_nearest(self, problem: Problem) -> list[ArtifactKey]:
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
