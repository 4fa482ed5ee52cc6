"""What the answers of a deployment may be, given the answers before.

Every operation has an interval, from before it was sent to after it was answered. An answer says
something about one moment in there, so two answers contradict each other only if one operation
began after the other had ended. An operation without an answer, or with 503, may have happened, and
may not.

    permanent   nothing is deleted: a key is written once. After a client has seen its digest,
                all clients see this digest, and no client sees the key absent.
    passing     artifacts are deleted and evicted: a key is absent, or has a digest that was put.
                A deleted key stays absent until a client puts it again.
"""

import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field

_CACHED_SECONDS = 4.0
"""A server knows rows for two seconds without asking; the rest is for a loaded host."""

_CLOCK_SECONDS = 0.05
"""Between the servers' clock and the test's."""


class ViolationError(AssertionError):
    """The deployment broke a promise."""


@dataclass(eq=False)
class Put:
    """One upload; `is_possible` unless it was refused for good."""

    digest: str
    size_bytes: int
    began: float
    ended: float = math.inf
    is_possible: bool = True


@dataclass
class _Key:
    puts: list[Put] = field(default_factory=list)
    known: str | None = None
    known_at: float = math.inf
    created_count: int = 0
    deleted: tuple[float, float] | None = None


class _Keys:
    def __init__(self):
        self._lock = threading.Lock()
        self._keys: dict[int, _Key] = defaultdict(_Key)

    def begin_put(self, number, digest, size_bytes, *, now):
        put = Put(digest, size_bytes, now)
        with self._lock:
            self._keys[number].puts.append(put)
        return put

    def end_put(self, put, *, now, is_possible):
        with self._lock:
            put.ended = now
            put.is_possible = is_possible

    def _check_was_put(self, key, number, digest, ended):
        if not any(put.digest == digest and put.is_possible for put in key.puts):
            raise ViolationError(f"key {number} has {digest}, which no client put there")


class Permanent(_Keys):
    """Keys of a namespace from which nothing may go."""

    def saw(self, number, digest, *, began, ended, how):
        """An answer said that the key has this digest."""
        with self._lock:
            key = self._keys[number]
            self._check_was_put(key, number, digest, ended)
            if key.known not in {None, digest}:
                raise ViolationError(f"{how}: key {number} had {key.known} and has {digest} now")
            key.known = digest
            key.known_at = min(key.known_at, ended)

    def saw_created(self, number, digest, *, began, ended):
        """An upload was told that it was the first."""
        self.saw(number, digest, began=began, ended=ended, how="PUT")
        with self._lock:
            key = self._keys[number]
            key.created_count += 1
            if key.created_count > 1 or key.known_at < began:
                raise ViolationError(
                    f"key {number} was stored for the second time: it was lost between"
                )

    def saw_absent(self, number, *, began, how):
        """An answer said that the key has no artifact."""
        with self._lock:
            key = self._keys[number]
            if key.known_at < began:
                raise ViolationError(
                    f"{how}: key {number} is absent, {began - key.known_at:.3f} s after it was "
                    f"known to have {key.known}"
                )

    @property
    def known(self):
        """The digest of every key that has one for sure."""
        with self._lock:
            return {number: key.known for number, key in self._keys.items() if key.known}


class Budgeted(_Keys):
    """Keys of a namespace with a limit: anything may go at any time."""

    def __init__(self, limit_bytes):
        super().__init__()
        self._limit_bytes = limit_bytes
        self._largest_overlap_bytes = 0
        self.largest_bytes = 0
        self._recent: list[Put] = []

    def begin_put(self, number, digest, size_bytes, *, now):
        put = super().begin_put(number, digest, size_bytes, now=now)
        with self._lock:
            self._recent.append(put)
        return put

    def saw(self, number, digest, *, began, ended, how):
        with self._lock:
            key = self._keys[number]
            self._check_was_put(key, number, digest, ended)
            if key.deleted is None or began < key.deleted[1] + _CACHED_SECONDS:
                return
            since = key.deleted[0]
            if not any(put.ended > since and put.is_possible for put in key.puts):
                raise ViolationError(f"{how}: key {number} was deleted and is back with {digest}")

    def saw_created(self, number, digest, *, began, ended):
        self.saw(number, digest, began=began, ended=ended, how="PUT")

    def saw_absent(self, number, *, began, how):
        """Always possible."""

    def saw_deleted(self, number, *, began, ended):
        with self._lock:
            self._keys[number].deleted = (began, ended)

    def saw_size(self, size_bytes):
        """What is stored now, as a server counts it.

        An upload is let in when it fits beside what is stored at that moment. So the limit is
        passed by no more than what other uploads brought between that moment and its end: the
        reservations in flight beside it.
        """
        with self._lock:
            self.largest_bytes = max(self.largest_bytes, size_bytes)
            self._measure_overlaps()
            most = self._limit_bytes + self._largest_overlap_bytes
            if size_bytes > most:
                raise ViolationError(
                    f"{size_bytes} bytes are stored; the limit is {self._limit_bytes}, and at most "
                    f"{self._largest_overlap_bytes} were reserved beside one upload"
                )

    def _measure_overlaps(self):
        """Looks at the uploads since the last time, and forgets those that no later one can
        overlap.
        """
        for one in self._recent:
            beside = sum(
                other.size_bytes
                for other in self._recent
                if other is not one and other.began < one.ended and one.began < other.ended
            )
            self._largest_overlap_bytes = max(self._largest_overlap_bytes, beside)
        oldest = min((put.began for put in self._recent if put.ended == math.inf), default=math.inf)
        self._recent = [put for put in self._recent if put.ended > oldest]


@dataclass(eq=False)
class _Grant:
    """`over_at`: when it may be over at the earliest."""

    fencing: int
    ended: float
    over_at: float


class _Lease:
    def __init__(self):
        self.grants: dict[str, _Grant] = {}
        self.uploads: list[Put] = []

    def may_end_by_upload(self, now):
        """An upload ends whatever lease there is at some moment in its interval."""
        self.uploads = [put for put in self.uploads if put.ended > now]
        if self.uploads:
            for grant in self.grants.values():
                grant.over_at = min(grant.over_at, now)


class Grants:
    """Leases: never two of one key that are held at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._leases: dict[tuple[str, int], _Lease] = defaultdict(_Lease)
        self.count = 0

    def granted(self, key, token, fencing, *, ttl_seconds, began, ended):
        with self._lock:
            self.count += 1
            lease = self._leases[key]
            new = lease.grants[token] = _Grant(fencing, ended, began + ttl_seconds)
            lease.may_end_by_upload(began)
            for other in lease.grants.values():
                if other is new:
                    continue
                # Of two that overlap, the number tells which came first.
                first, second = sorted((new, other), key=lambda grant: grant.fencing)
                if first.fencing == second.fencing:
                    raise ViolationError(f"two grants of {key} have the fencing number {fencing}")
                if first.over_at > second.ended + _CLOCK_SECONDS:
                    raise ViolationError(
                        f"the lease of {key} was granted (fencing {second.fencing}) while another "
                        f"(fencing {first.fencing}) had {first.over_at - second.ended:.3f} s left"
                    )

    def renewed(self, key, token, *, ttl_seconds, began):
        with self._lock:
            lease = self._leases[key]
            lease.grants[token].over_at = began + ttl_seconds
            lease.may_end_by_upload(began)

    def releasing(self, key, token, *, now):
        with self._lock:
            grant = self._leases[key].grants[token]
            grant.over_at = min(grant.over_at, now)

    def uploading(self, key, put):
        with self._lock:
            lease = self._leases[key]
            lease.uploads.append(put)
            lease.may_end_by_upload(put.began)
