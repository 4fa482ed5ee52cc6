"""MissLog: what this process had to compile, and what it was made of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final

from graphstash._compile.request import CompileRequest
from graphstash._http.client import ServerClient
from graphstash.errors import Reason
from graphstash_schema.protocol import MAX_DESCRIBE_BYTES, MAX_DESCRIPTIONS

if TYPE_CHECKING:
    from graphstash_schema import ArtifactKey
    from graphstash_schema.explanation import Description

__all__ = ["Miss", "MissLog"]

_log = logging.getLogger("graphstash")

_MAX_MISSES: Final = 512
"""Of one process: a job that compiles more has one cause for most of them."""

_TELL_SECONDS: Final = 3.0
"""After this long no further call is made: a job waits for it when it ends."""


@dataclass(slots=True)
class Miss:
    """Something that was compiled here.

    Attributes:
        description: what it is made of.
        reason: why the cache could not help; None where nobody had it.
        compile_seconds: wall time that it took; 0 until it is done.
    """

    description: Description
    reason: Reason | None
    compile_seconds: float = 0.0


class MissLog:
    """The misses of one process, for many threads; tells the server what was published of them.

    Nothing here raises: an explanation is worth no training step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._misses: dict[ArtifactKey, Miss] = {}
        self._published: list[Description] = []
        self._is_refused = False

    @property
    def misses(self) -> tuple[Miss, ...]:
        """What was compiled, in order."""
        with self._lock:
            return tuple(self._misses.values())

    def add(self, request: CompileRequest, *, reason: Reason | None) -> None:
        """Notes that something has to be compiled."""
        try:
            if len(self._misses) >= _MAX_MISSES:
                return
            from graphstash_schema.explanation import described  # a job that hits needs it not

            parts = {**request.details(), **request.parts}
            miss = Miss(described(request.key, request.label, parts), reason)
        except Exception:  # noqa: BLE001 - compilers raise what they like when they are asked
            _log.debug("a miss cannot be described", exc_info=True)
            return
        with self._lock:
            self._misses[request.key] = miss

    def compiled(self, key: ArtifactKey, *, seconds: float, is_published: bool) -> None:
        """Notes what became of it; `is_published` tells whether the server has it."""
        with self._lock:
            miss = self._misses.get(key)
            if miss is not None:
                miss.compile_seconds = seconds
                if is_published:
                    self._published.append(miss.description)

    @property
    def is_full(self) -> bool:
        """Whether `tell` has enough to say for one call."""
        return len(self._published) >= MAX_DESCRIPTIONS

    def tell(self, server: ServerClient) -> None:
        """Tells the server what the published artifacts are made of."""
        with self._lock:
            published, self._published = self._published, []
        until = monotonic() + _TELL_SECONDS
        try:
            for batch in _batches(published):
                if self._is_refused or monotonic() > until:
                    return
                server.describe(batch)
        except Exception as error:  # noqa: BLE001 - also of an earlier server, without such a call
            self._is_refused = True
            _log.debug("the server does not take descriptions: %s", error)


def _batches(descriptions: Iterable[Description]) -> Iterable[list[Description]]:
    """As many as one call takes."""
    batch: list[Description] = []
    size = 0
    for each in descriptions:
        more = len(each.model_dump_json())
        if batch and (len(batch) == MAX_DESCRIPTIONS or size + more > MAX_DESCRIBE_BYTES // 2):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += more
    if batch:
        yield batch
