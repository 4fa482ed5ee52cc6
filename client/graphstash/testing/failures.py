"""Protocol calls, stored artifacts, and failures that a test can inject."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

from graphstash_schema import ArtifactKey, ArtifactMetadata

__all__ = ["Call", "Failure", "Fault", "ServerCall", "StoredArtifact"]

ServerCall: TypeAlias = Literal[
    "get", "head", "put", "delete", "lookup", "verify", "report", "acquire", "renew", "release",
    "get_manifest", "put_manifest", "put_run", "get_run", "list_runs",
    "list_withdrawals", "other",
    "stats", "access", "health", "ready",
]  # fmt: skip
"""A protocol call on an artifact, its compile lease, a manifest, a run report, or the server.

`other` is any other request to the server.
"""

Fault: TypeAlias = Literal[
    "reset", "hang", "truncate", "flip", "wrong_artifact", "stranger",
]  # fmt: skip
"""A failure other than an error status:

* `reset`: the server resets the connection without a response. If the connection was kept alive,
  the client repeats the call once, so `times=1` may have no effect.
* `hang`: the server does not respond until the client disconnects or the failure is removed.
* `truncate`: the server closes the connection in the middle of the body.
* `flip`: the server flips one bit in the middle of the body.
* `wrong_artifact`: the server answers a `get` with another artifact of the namespace.
* `stranger`: the server answers with 200 and an HTML page, as another web server would.
"""


@dataclass(eq=False, kw_only=True)
class Failure:
    """A failure that `FakeServer.fail_on` has set up. As a context manager, it ends with its block.

    Attributes:
        operations: calls that fail. Empty means every call.
        fault: kind of failure. None means an error response with `status`.
        status: HTTP status of the response. 429 and 503 request a pause of one second.
        times: number of calls that fail before the server recovers. None means no limit.
        namespace: only calls in this namespace fail. None means any.
        kind: only calls on an artifact of this kind fail. None means any.
        key: only calls on this artifact fail. None means any.
        count: number of calls that this failure has hit.
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
        """Block until `count` calls have failed, so that a test does not have to sleep.

        Raises:
            TimeoutError: fewer calls failed within `timeout_seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, timeout_seconds):
                raise TimeoutError(
                    f"{self.count} of {count} calls came within {timeout_seconds:g} s"
                )

    def remove(self) -> None:
        """End the failure. The server then answers calls that hang because of it."""
        self._removed.set()

    def is_removed(self, *, within_seconds: float = 0.0) -> bool:
        """Return whether the failure has ended. Wait up to `within_seconds` for its end."""
        return self._removed.wait(within_seconds)

    def applies_to(self, call: "Call") -> bool:
        """Return whether the failure hits this call. Counts the hit, so ask only once per call."""
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
        operation: the protocol call.
        namespace: namespace of the call. None for a call on the server itself.
        key: key of the artifact, for a call on a single artifact.
        headers: request headers, with lower-case names.
        failure: the failure that hit the call. None if the server answered normally.
    """

    operation: ServerCall
    namespace: str | None
    key: ArtifactKey | None
    headers: Mapping[str, str]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One artifact on the server.

    Attributes:
        namespace: namespace of the artifact.
        key: key of the artifact.
        blob: uploaded bytes: the compressed envelope. `Stash.get` returns the payload inside.
        metadata: metadata from the publisher, if any.
        is_withheld: whether a client reported the artifact as wrong, so that it is not served.
        hits: number of downloads.
    """

    namespace: str
    key: ArtifactKey
    blob: bytes
    metadata: ArtifactMetadata | None = None
    is_withheld: bool = False
    hits: int = 0
