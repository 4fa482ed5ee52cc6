"""Standing: whether a job may use this host's copies of artifacts.

A copy stays on this host's disk when the server withholds, deletes or replaces the artifact, or
when the job has no right to read it. So a run asks the server before it uses a copy, for many
copies at once, and again after `RECHECK_SECONDS`. If a look-up reports new withdrawals, the process
reads the server's list of withdrawals (`withdrawals`). If the list does not continue where this
host stopped reading, the host sets its older copies aside: it may have missed withdrawals of them,
so a job uses such a copy only if the server has the same bytes.

    the server has these bytes      the job uses the copy
    it has other bytes              the copy is deleted, because all hosts run the same executable.
                                    If it is set aside, it is kept unused
    it has none                     the job does not use the copy. It is deleted, unless it is set
                                    aside, or this process has read the whole list without finding
                                    these bytes in it
    the job may not read there      the job does not use the copy, which another job may need
    the server does not answer      the job uses the copy, unless it is set aside, if this host
                                    reached the server within GRAPHSTASH_OFFLINE_SECONDS

The last three rows do not apply to a copy that this host compiled and no server is known to have
stored: unless it is set aside, a job uses it without confirmation by a server. If the server
answers, this process must have read the whole list. The copy is deleted when the server withdraws
equal bytes. A copy that was imported from a bundle needs confirmation, because the server may have
withdrawn it before.

If an upload began and did not end, because the process was killed or the response was lost, the
server may have stored the copy and withdrawn it since. Such a copy is on offer: the job uses it
while the server does not answer, but not if the server lacks it.
"""

import hashlib
import heapq
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from graphstash._artifacts.local_tier import OWN, LocalTier
from graphstash._artifacts.run_folder import SharedLines
from graphstash._artifacts.withdrawals import Named, Withdrawals
from graphstash._forking import forkable, unforked
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, RefusedError
from graphstash_schema import ArtifactKey, InvalidValueError, Namespace
from graphstash_schema.names import ListPosition
from graphstash_schema.protocol import MAX_LOOKUP_KEYS

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance
    from graphstash_schema import ArtifactInfo, LookupResponse

__all__ = ["RECHECK_SECONDS", "Standing", "Verdict"]

_log = logging.getLogger("graphstash")

RECHECK_SECONDS: Final = 600.0
"""Seconds for which an answer of the server is valid for the processes of a run."""

_RETRY_SECONDS: Final = 30.0
"""Seconds after a failed look-up in a namespace for which this process sends no further look-up
there, and raises the same error again."""

_TOUCH_SECONDS: Final = 60.0
"""Seconds between two records that this host has reached the server."""

_ABSENT: Final = "-"
_SERVER_LAG_SECONDS: Final = 5.0
"""Seconds after this process has received a withdrawal for which it ignores answers that the server
has the withdrawn bytes. Another server process may serve them from memory for two more seconds, and
the rest is a margin."""

_WITHHELD: Final = "!"
"""Prefix of the SHA-256 of an artifact that the server withholds."""

_WITHDRAWN: Final = "~"
"""Prefix of the SHA-256 of a listed withdrawal. The key may have other bytes now."""

_OUTDATED: Final = "@outdated"
_MOVED: Final = "@moved"
"""Shared lines have one of these instead of a key. `@outdated`: earlier answers are invalid.
`@moved`: the process has applied the list from one position to another."""

_ANSWER_FORM: Final = re.compile(r"-|[!~]?[0-9a-f]{64}")
"""Form of the answer about a key in a shared line."""

_ORIGIN: Final = "_origin"
"""File in the folder of a server's URL. It has the origin of copies from that server: the name of
their folder in the tier. Namespaces have files beside it, but no namespace begins with "_"."""

_ORIGIN_FORM: Final = re.compile(r"(url|server)-[0-9a-f]{16,64}")


class Verdict(Enum):
    """What to do with a copy. `IGNORE`: keep it on the disk, but do not use it."""

    USE = auto()
    IGNORE = auto()
    DELETE = auto()


class Standing:
    """Decides about copies for one process. Thread-safe.

    Args:
        run_folder: folder in which the processes of a run share the server's answers. None: share
            nothing.
    """

    def __init__(self, server: ServerClient, tier: LocalTier, run_folder: Path | None) -> None:
        self._server = server
        self._config = server.config
        self._tier = tier
        self._folder = tier.server_folder(self._config.url)
        name = self._folder.name
        # Processes of a run may ask other servers, or have other rights.
        token = self._config.token.reveal() if self._config.token else ""
        caller = f"{name} {token} {self._config.token_file}"
        digest = hashlib.sha256(caller.encode()).hexdigest()[:16]
        answers = None if run_folder is None else run_folder / f"answers-{digest}"
        self._shared = SharedLines(answers)
        self._is_shared_whole = True
        self._origin = _read_origin(self._folder / _ORIGIN) or f"url-{name}"
        # A signal handler may compile in the same thread.
        self._request_lock = threading.RLock()
        self._stored: dict[tuple[Namespace, ArtifactKey], tuple[str | None, float]] = {}
        self._withdrawn: dict[tuple[Namespace, ArtifactKey], dict[str, float]] = {}
        self._void_before: dict[Namespace, float] = {}
        self._failed: dict[Namespace, tuple[CacheError, float]] = {}
        self._touched: dict[Namespace, float] = {}
        self._has_warned = False
        self._changes = 0
        self._withdrawals = Withdrawals(
            self._config,
            tier,
            self._folder,
            origins=lambda: self.origins,
            listener=self,
        )

    @property
    def changes(self) -> int:
        """Counter that increases when an artifact in the memory of this process may have been
        withdrawn. Includes withdrawals that other processes of the run have read.
        """
        self._read_shared()
        return self._changes

    @property
    def origin(self) -> str:
        """Origin of copies from this job's server."""
        return self._origin

    @property
    def offered(self) -> str:
        """Origin of copies on offer to this job's server."""
        return f"offer-{self._origin}"

    @property
    def origins(self) -> tuple[str, ...]:
        """Origins of the copies that this job may use."""
        return (self.origin, self.offered, OWN) if self._server.is_configured else (OWN,)

    def has(self, namespace: Namespace, key: ArtifactKey) -> bool:
        """Return whether there is a copy, even if the job may not use it."""
        return any(self._tier.has(namespace, key, origin=each) for each in self.origins)

    def verdict(
        self, namespace: Namespace, key: ArtifactKey, proof: "Provenance", *, origin: str
    ) -> Verdict:
        """Return what to do with a copy. The tier stores `proof` with the copy, under `origin`."""
        self._read_shared()
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        is_own = origin in (OWN, self.offered)
        if is_own and not self._server.is_configured:
            return Verdict.USE
        needs_confirmation = self._needs_confirmation(namespace, proof, origin=origin)
        if is_own and _is_recent(proof.stored_at) and not needs_confirmation:
            return Verdict.USE
        try:
            stored = self.stored(namespace, key)
        except CacheError as error:
            if isinstance(error, RefusedError):
                _log.debug("graphstash: no copy of %s is used: %s", namespace, error)
            is_refused = isinstance(error, RefusedError) and error.status < 500
            may_use = is_own or (not is_refused and self._had_recent_contact(namespace))
            return Verdict.USE if may_use and not needs_confirmation else Verdict.IGNORE
        return self.verdict_of_answer(namespace, key, proof, stored, origin=origin)

    def verdict_of_answer(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        proof: "Provenance",
        stored: str | None,
        *,
        origin: str,
    ) -> Verdict:
        """Return what to do with a copy. `stored` is the SHA-256 of the bytes that the server has
        under the key of the copy, or None.
        """
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        if stored == proof.sha256:
            if origin != self.origin:
                self._tier.change_origin(namespace, key, from_origin=origin, to_origin=self.origin)
            return Verdict.USE
        if stored is None:
            return self._verdict_of_unknown(namespace, key, proof, origin=origin)
        is_set_aside = self._withdrawals.is_set_aside(namespace, proof.stored_at)
        return Verdict.IGNORE if is_set_aside else Verdict.DELETE

    def _verdict_of_unknown(
        self, namespace: Namespace, key: ArtifactKey, proof: "Provenance", *, origin: str
    ) -> Verdict:
        """Return what to do with a copy if the server has nothing under its key.

        The list tells whether the server has withdrawn these bytes. If the list does not continue
        at this host's position, the server may be another one or may have lost its data.
        """
        is_current = self.is_current(namespace)
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        needs_confirmation = self._needs_confirmation(namespace, proof, origin=origin)
        if origin != OWN:
            is_applied = is_current and self._withdrawals.follows(namespace)
            is_kept = proof.sha256 and (is_applied or needs_confirmation)
            return Verdict.IGNORE if is_kept else Verdict.DELETE
        # The caller opened the copy before this process read the list, which may have deleted it.
        is_there = self._tier.has(namespace, key, origin=OWN)
        return Verdict.USE if is_current and is_there and not needs_confirmation else Verdict.IGNORE

    def _needs_confirmation(
        self, namespace: Namespace, proof: "Provenance", *, origin: str
    ) -> bool:
        """Return whether the job may use a copy only if the server has the same bytes."""
        is_imported = proof.is_imported and origin == OWN
        return is_imported or self._withdrawals.is_set_aside(namespace, proof.stored_at)

    def _is_withdrawn(self, namespace: Namespace, key: ArtifactKey, proof: "Provenance") -> bool:
        """Return whether this process read of a withdrawal of these bytes after this host stored
        them.
        """
        at = self._withdrawn.get((namespace, key), {}).get(proof.sha256)
        return at is not None and proof.stored_at <= at

    def stored(self, namespace: Namespace, key: ArtifactKey) -> str | None:
        """Return the SHA-256 of the bytes that the server has under a key, or None. The answer is
        at most `RECHECK_SECONDS` old.

        Raises:
            CacheError: the server did not answer, or refused.
        """
        with forkable(), self._request_lock, unforked():
            known = self._known(namespace, key)
            if known is None:
                known = self._ask(namespace, key)
            return known[0]

    def note(self, namespace: Namespace, key: ArtifactKey, sha256: str, *, asked_at: float) -> None:
        """Record that the server has sent these bytes, or confirmed that it stored them."""
        self._record(namespace, key, sha256, asked_at)
        self._share([_line(asked_at, namespace, key, sha256)])
        self._record_contact(namespace)

    def deletion_mark(self, namespace: Namespace) -> object:
        """Return a value that changes before this host deletes withdrawn copies."""
        return self._withdrawals.deletion_mark(namespace)

    def confirms(self, namespace: Namespace, key: ArtifactKey, sha256: str) -> bool:
        """Ask the server, even if an answer is known, whether it has these bytes under a key now.

        Return False if the look-up fails, or is not sent because an earlier one failed.
        """
        with suppress(CacheError), forkable(), self._request_lock, unforked():
            return self._ask(namespace, key)[0] == sha256
        return False

    def follow(self, namespace: Namespace, newest: str | None, *, asked_at: float) -> None:
        """Read the server's list if a look-up that was sent at `asked_at` reports new entries."""
        self._withdrawals.follow(namespace, newest, asked_at=asked_at)

    def on_withdrawn(self, namespace: Namespace, named: Named, *, at: float) -> None:
        """See `Listener`."""
        for key, sha256 in named:
            self._record(namespace, key, f"{_WITHDRAWN}{sha256}", at)
        self._changes += bool(named)
        self._share([_line(at, namespace, key, f"{_WITHDRAWN}{sha256}") for key, sha256 in named])

    def on_outdated(self, namespace: Namespace, *, before: float, is_for_run: bool) -> None:
        """See `Listener`."""
        self._drop_answers(namespace, before)
        if is_for_run:
            self._share([_line(before, namespace, _OUTDATED, "-")])

    def on_moved(self, namespace: Namespace, start: ListPosition, end: ListPosition) -> None:
        """See `Listener`."""
        # If a line with a withdrawal could not be shared, the other processes must read the list.
        if self._is_shared_whole:
            self._share([_line(time(), namespace, _MOVED, f"{start}/{end}")])

    def _is_void(self, namespace: Namespace, at: float) -> bool:
        """Return whether an answer is too old. Ignore a future limit: the clock was set back."""
        return at < self._void_before.get(namespace, 0.0) <= time()

    def _drop_answers(self, namespace: Namespace, before: float) -> None:
        self._void_before[namespace] = max(before, self._void_before.get(namespace, 0.0))
        for where, (_, at) in tuple(self._stored.items()):
            if where[0] == namespace and at < before:
                self._stored.pop(where, None)
        self._changes += 1

    def _record_contact(self, namespace: Namespace) -> None:
        if monotonic() - self._touched.get(namespace, -_TOUCH_SECONDS) < _TOUCH_SECONDS:
            return
        self._touched[namespace] = monotonic()
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if _read_origin(self._folder / _ORIGIN) != self._origin:
                _write(self._folder / _ORIGIN, self._origin)
            _write(self._folder / namespace, "")

    def _had_recent_contact(self, namespace: Namespace) -> bool:
        """Return whether this host reached the server within `offline_seconds`."""
        try:
            at = (self._folder / namespace).stat().st_mtime
        except OSError:
            at = 0.0
        if 0 <= time() - at < self._config.offline_seconds:
            return True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "graphstash: %s has not answered for more than %g s (GRAPHSTASH_OFFLINE_SECONDS): "
                "copies on this host's disk are not used",
                self._config.url,
                self._config.offline_seconds,
            )
        return False

    def _known(self, namespace: Namespace, key: ArtifactKey) -> tuple[str | None, float] | None:
        self._read_shared()
        known = self._stored.get((namespace, key))
        return known if known is not None and _is_recent(known[1]) else None

    def _ask(self, namespace: Namespace, key: ArtifactKey) -> tuple[str | None, float]:
        """Look up a key, together with keys of other copies on this host."""
        if failed := self._failed.get(namespace):
            error, at = failed
            if monotonic() - at < _RETRY_SECONDS:
                raise error
        asked_at, batch = time(), self._batch(namespace, key)
        try:
            reply = self._server.lookup(batch, namespace=namespace)
        except CacheError as error:
            self._failed[namespace] = error, monotonic()
            raise
        self._failed.pop(namespace, None)
        answers = self.take(namespace, batch, reply, asked_at=asked_at)
        answer = answers[key]
        return None if answer == _ABSENT or answer.startswith(_WITHHELD) else answer, asked_at

    def take(
        self,
        namespace: Namespace,
        batch: Sequence[ArtifactKey],
        reply: "LookupResponse",
        *,
        asked_at: float,
    ) -> Mapping[ArtifactKey, str]:
        """Record the server's response to a look-up, and return the answers by key."""
        self._record_contact(namespace)
        answers = dict.fromkeys(batch, _ABSENT)
        answers |= {each.key: _sha256_of(each) for each in reply.found}
        answers |= {each.key: f"{_WITHHELD}{_sha256_of(each)}" for each in reply.withdrawn}
        for each, answer in answers.items():
            self._record(namespace, each, answer, asked_at)
        self._share([_line(asked_at, namespace, *each) for each in answers.items()])
        self.follow(namespace, reply.newest_withdrawal, asked_at=asked_at)
        return answers

    def may_publish(self, namespace: Namespace, key: ArtifactKey, proof: "Provenance") -> bool:
        """Return whether this host compiled the bytes, the server has nothing under the key, and no
        known withdrawal concerns the bytes. Call this only if `is_current` returns True.
        """
        return (
            not self._is_withdrawn(namespace, key, proof)
            and not proof.is_imported
            and not self._withdrawals.is_set_aside(namespace, proof.stored_at)
            and self.stored(namespace, key) is None
        )

    def has_list(self, namespace: Namespace) -> bool:
        """Return whether the latest look-up of this process reported a list of withdrawals."""
        return self._withdrawals.follows(namespace)

    def is_current(self, namespace: Namespace) -> bool:
        """Return whether this process has applied the list, or the server has reported none. Wait
        for the list within the time limits.
        """
        patience = self._config.connect_seconds + self._config.first_byte_seconds
        return self._withdrawals.is_current(namespace, wait_seconds=patience)

    def _record(self, namespace: Namespace, key: ArtifactKey, answer: str, at: float) -> None:
        """Store the answer about a key, unless a newer one is stored."""
        where = namespace, key
        if answer.startswith((_WITHHELD, _WITHDRAWN)):
            withdrawn = self._withdrawn.setdefault(where, {})
            withdrawn[answer[1:]] = max(at, withdrawn.get(answer[1:], 0.0))
        known = self._stored.get(where)
        if answer.startswith(_WITHDRAWN):
            if known is not None and known[1] <= at:
                self._stored.pop(where, None)  # the next use looks up the key again
            return
        if (known is not None and known[1] > at) or self._is_void(namespace, at):
            return
        is_stored = answer != _ABSENT and not answer.startswith(_WITHHELD)
        if is_stored:
            withdrawn = self._withdrawn.get(where, {})
            if withdrawn.get(answer, -_SERVER_LAG_SECONDS) + _SERVER_LAG_SECONDS > at:
                return  # requested before the withdrawal, or from a server that lags behind it
            withdrawn.pop(answer, None)
        self._stored[where] = answer if is_stored else None, at

    def _batch(self, namespace: Namespace, key: ArtifactKey) -> list[ArtifactKey]:
        """Return the key, and the most recently used keys of its kind and device type."""
        known = {
            each.fingerprint
            for (name, each), (_, at) in tuple(self._stored.items())
            if name == namespace and _is_recent(at)
        }
        unknown = {
            fingerprint: used_at
            for name in self._config.readable
            for origin in self.origins
            for used_at, fingerprint in self._tier.similar(name, key, origin=origin)
            if fingerprint not in known
        }
        batch = {key: None}
        for fingerprint in heapq.nlargest(MAX_LOOKUP_KEYS - 1, unknown, key=unknown.__getitem__):
            with suppress(InvalidValueError):  # a foreign file in the tier
                batch[ArtifactKey.parse(key.kind, key.device_type, fingerprint)] = None
        return list(batch)

    def _share(self, lines: Sequence[str]) -> None:
        # The first newline ends a torn line of another process.
        self._is_shared_whole &= self._shared.append("".join(("\n", *lines)))

    def _read_shared(self) -> None:
        """Record the answers that processes of the run have shared since the last call."""
        for line in self._shared.added():
            try:
                at, namespace, key, answer = line.split(" ")
                self._record_line(float(at), Namespace(namespace), key, answer)
            except ValueError:
                self._distrust()

    def _distrust(self) -> None:
        """Forget all answers. A process was killed while it wrote, or the disk is full, and the
        missing lines may be withdrawals.
        """
        for namespace in self._config.readable:
            self._withdrawals.forget(namespace)
            self._drop_answers(namespace, time())

    def _record_line(self, at: float, namespace: Namespace, key: str, answer: str) -> None:
        if key == _OUTDATED:
            self._drop_answers(namespace, at)
        elif key == _MOVED:
            self._withdrawals.note_moved(namespace, *map(ListPosition, answer.split("/")))
        elif not _ANSWER_FORM.fullmatch(answer):
            raise ValueError(f"torn: {answer}")
        else:
            self._record(namespace, ArtifactKey.parse(*key.split("/")), answer, at)
            self._changes += answer.startswith(_WITHDRAWN)


def _is_recent(at: float) -> bool:
    """Return whether a time of this host's clock is less than `RECHECK_SECONDS` ago."""
    return 0 <= time() - at < RECHECK_SECONDS


def _sha256_of(found: "ArtifactInfo") -> str:
    return found.digest.partition(":")[2]


def _line(at: float, namespace: Namespace, key: ArtifactKey | str, answer: str) -> str:
    return f"{at:.6f} {namespace} {key} {answer}\n"


def _read_origin(path: Path) -> str | None:
    try:
        text = path.read_text("ascii")
    except (OSError, ValueError):
        return None
    return text if _ORIGIN_FORM.fullmatch(text) else None


def _write(path: Path, text: str) -> None:
    """Replace a small file by one write. A torn file has no valid form, so readers ignore it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.utime(descriptor)
    finally:
        os.close(descriptor)
