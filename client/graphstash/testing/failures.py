"""Calls of the protocol, and how they can be made to fail."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from graphstash_schema import ArtifactKey

__all__ = ["Call", "Failure", "Fault", "ServerCall"]

ServerCall: TypeAlias = Literal[
    "get", "head", "put", "delete", "lookup", "verify", "report", "acquire", "renew", "release",
    "get_manifest", "put_manifest", "put_run", "get_run", "list_runs",
    "stats", "access", "health", "ready",
]  # fmt: skip
"""A call of the protocol: on an artifact, on the lease to compile one, on a manifest, on what a run
reports, or on the server itself."""

Fault: TypeAlias = Literal[
    "reset", "hang", "truncate", "flip", "wrong_artifact", "stranger",
]  # fmt: skip
"""A failure other than an error status:

* `reset`: the connection is reset instead of an answer. The client repeats a call once when a
  connection that it had kept open breaks, so it may not notice `times=1`.
* `hang`: no answer until the client hangs up or the failure is removed.
* `truncate`: the connection ends in the middle of the body.
* `flip`: one bit in the middle of the body is flipped.
* `wrong_artifact`: a `get` is answered with another artifact of the namespace.
* `stranger`: another web server answers: 200 and an HTML page to everything.
"""


@dataclass(eq=False, kw_only=True)
class Failure:
    """A failure that `FakeServer.fail_on` has set up; as a context manager it ends with its block.

    Attributes:
        operations: the calls that fail; empty means every call.
        fault: how they fail; None means that they are answered with `status`.
        status: the HTTP status of the answer; 429 and 503 ask for a pause of one second.
        times: how many calls fail before the server recovers; None for no limit.
        namespace: only calls in this namespace fail; None for any.
        kind: only calls on an artifact of this kind fail; None for any.
        key: only calls on this artifact fail; None for any.
        count: number of calls that have failed because of it.
    """

    operations: frozenset[ServerCall]
    fault: Fault | None
    status: int
    times: int | None
    namespace: str | None
    kind: str | None
    key: ArtifactKey | None
    count: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _removed: threading.Event = field(default_factory=threading.Event, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def wait(self, *, count: int = 1, timeout_seconds: float = 30.0) -> None:
        """Blocks until `count` calls have failed, so that a test need not sleep.

        Raises:
            TimeoutError: fewer calls came within `timeout_seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, timeout_seconds):
                raise TimeoutError(
                    f"{self.count} of {count} calls came within {timeout_seconds:g} s"
                )

    def remove(self) -> None:
        """Ends the failure; calls that hang because of it are answered now."""
        self._removed.set()

    def is_removed(self, *, within_seconds: float = 0.0) -> bool:
        """Whether it has ended, or ends within some seconds."""
        return self._removed.wait(within_seconds)

    def applies_to(self, call: "Call") -> bool:
        """Whether the call fails because of it; the server asks once per call, which is counted."""
        with self._changed:
            applies = (
                not self._removed.is_set()
                and (not self.operations or call.operation in self.operations)
                and self.namespace in (None, call.namespace)
                and self.key in (None, call.key)
                and self.kind in (None, call.key and call.key.kind)
                and (self.times is None or self.count < self.times)
            )
            self.count += applies
            self._changed.notify_all()
        return applies


@dataclass(frozen=True, slots=True)
class Call:
    """One request that the server received.

    Attributes:
        operation: the call of the protocol.
        namespace: the namespace of the call; None for a call on the server itself.
        key: the artifact, for a call on a single one.
        headers: of the request, names in lower case.
        failure: the failure that `fail_on` had set up for it; None when it was answered properly.
    """

    operation: ServerCall
    namespace: str | None
    key: ArtifactKey | None
    headers: Mapping[str, str]
    failure: Failure | None = None
