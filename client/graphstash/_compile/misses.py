"""MissLog: the programs that this process had to compile, with descriptions of their inputs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from graphstash._compile.request import CompileRequest
from graphstash._http.client import ServerClient
from graphstash.errors import Reason, RefusedError
from graphstash_schema.protocol import MAX_DESCRIBE_BYTES, MAX_DESCRIPTIONS

if TYPE_CHECKING:
    from graphstash_schema import ArtifactKey
    from graphstash_schema.explanation import Description

__all__ = ["Miss", "MissLog"]

_log = logging.getLogger("graphstash")

_MAX_MISSES: Final = 512
"""Maximum number of misses in the log. Most further misses have the same cause."""

_SEND_SECONDS: Final = 3.0
"""Seconds after which `send` starts no further call, because an exiting job waits for it."""


@dataclass(slots=True)
class Miss:
    """A program that this process had to compile.

    Attributes:
        reason: Why the cache could not help, or None if the artifact did not exist.
        compile_seconds: Wall time of the compilation, or 0 until it has finished.
        detail: More about the reason, such as the value that makes a program unshareable.
        unsent: Why the upload of the result failed, or "".
    """

    description: Description
    reason: Reason | None
    compile_seconds: float = 0.0
    detail: str = ""
    unsent: str = ""

    @property
    def trouble(self) -> str | None:
        """The reason with its detail, or None if the artifact did not exist."""
        if self.reason is None:
            return None
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value


class MissLog:
    """The misses of one process, and the descriptions that it will send to the server.

    Thread-safe. The methods never raise, because an explanation must not break a training step.

    Attributes:
        added: Called with the first miss of each program, in the thread that is about to compile.
    """

    def __init__(self) -> None:
        self.added: Callable[[Miss], None] = lambda _: None
        self._lock = threading.Lock()  # guards changes of the two fields below
        self._misses: dict[ArtifactKey, Miss] = {}
        self._published: list[Description] = []
        self._is_refused = False

    @property
    def misses(self) -> tuple[Miss, ...]:
        """The misses, in the order of the first miss of each program."""
        with self._lock:
            return tuple(self._misses.values())

    def add(self, request: CompileRequest, *, reason: Reason | None, detail: str = "") -> None:
        """Add a program that this process has to compile."""
        try:
            if len(self._misses) >= _MAX_MISSES:
                return
            if reason is None and request.key in self._misses:
                return  # `Packs` logged it, and its result was too slow or too large for a pack
            from graphstash_schema.explanation import (
                make_description,
            )  # only a job with misses needs it

            script = Path(sys.argv[0] if sys.argv else "").name
            parts = {"script": script, **request.details(), **request.parts}
            miss = Miss(make_description(request.key, request.label, parts), reason, detail=detail)
        except Exception:  # noqa: BLE001 - a compiler may raise any exception for `details`
            _log.debug("a miss cannot be described", exc_info=True)
            return
        with self._lock:
            is_new = request.key not in self._misses
            self._misses[request.key] = miss
        try:
            if is_new:
                self.added(miss)
        except Exception:  # noqa: BLE001 - a miss without a cause must not break a training step
            _log.debug("a miss cannot be explained", exc_info=True)

    def describe_pack(self, request: CompileRequest) -> None:
        """Add a description of a published pack for `send`. It contains no program."""
        try:
            from graphstash_schema.explanation import is_of_program, make_description

            parts = {**request.details(), **request.parts}
            shared = {name: value for name, value in parts.items() if not is_of_program(name)}
            description = make_description(request.key, request.label, shared)
        except Exception:  # noqa: BLE001 - a compiler may raise any exception for `details`
            _log.debug("a pack cannot be described", exc_info=True)
            return
        with self._lock:
            self._published.append(description)

    def add_parts(self, key: ArtifactKey, parts: Mapping[str, str]) -> None:
        """Add results of a compilation to the description of its program."""
        try:
            from graphstash_schema.explanation import make_description

            with self._lock:
                if (miss := self._misses.get(key)) is not None:
                    before = miss.description
                    miss.description = make_description(
                        key, before.label, {**before.parts, **parts}
                    )
        except Exception:  # noqa: BLE001 - an explanation must not break a training step
            _log.debug("parts of %s cannot be described", key, exc_info=True)

    def record_compilation(self, key: ArtifactKey, *, seconds: float, is_published: bool) -> None:
        """Record the end of a compilation. `send` describes the artifact if it is published."""
        with self._lock:
            miss = self._misses.get(key)
            if miss is not None:
                miss.compile_seconds = seconds
                if is_published:
                    self._published.append(miss.description)

    def record_failed_upload(self, key: ArtifactKey, why: str) -> None:
        """Record why the upload of a result failed."""
        with self._lock:
            miss = self._misses.get(key)
            if miss is not None:
                miss.unsent = why

    def description_of(self, key: ArtifactKey) -> Description | None:
        """Return the description of a program, or None if the log does not contain it."""
        miss = self._misses.get(key)
        return None if miss is None else miss.description

    @property
    def is_full(self) -> bool:
        """Whether the descriptions of published artifacts fill one call to the server."""
        return len(self._published) >= MAX_DESCRIPTIONS

    def send(self, server: ServerClient) -> None:
        """Send the new descriptions to the server. The next call sends what this one could not,
        unless the server refuses it.
        """
        with self._lock:
            published, self._published = self._published, []
        until = monotonic() + _SEND_SECONDS
        batches = [] if self._is_refused else list(_batches(published))
        try:
            while batches and monotonic() < until:
                server.describe(batches[0])
                del batches[0]
        except RefusedError as error:  # also of older servers without this call
            self._is_refused = error.status < 500
            _log.debug("the server does not take descriptions: %s", error)
        except Exception as error:  # noqa: BLE001 - an explanation must not break a training step
            _log.debug("descriptions were not sent: %s", error)
        if not self._is_refused:
            with self._lock:
                self._published[:0] = [each for batch in batches for each in batch]


def _batches(descriptions: Iterable[Description]) -> Iterable[list[Description]]:
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
