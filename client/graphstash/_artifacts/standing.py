"""Standing: whether this host's copies of artifacts may still be used.

A copy on this host's disk outlives what its server decides: the artifact may be withheld, deleted
or replaced, and the job may have no right to read it. So a run asks the server before it uses a
copy, for many copies at once, and again after `RECHECK_SECONDS`. If a look-up says that something
was withdrawn since, it reads what (`withdrawals`).

    the server has these bytes      the copy is used
    it has other bytes              the copy is deleted
    it has none                     the copy is not used; it is deleted if the list names it
    the job may not read there      the copy is left alone: it may be another job's
    the server does not answer      the copy is used if this host reached the server within
                                    GRAPHSTASH_OFFLINE_SECONDS, else not

What this host compiled and no server has stored needs no leave of a server, but yields to other
bytes there: all hosts run the same executable. It is deleted when the server withdraws equal bytes.
What was imported from a bundle needs leave: a server may have withdrawn it before.

Whether a server has stored a copy is unknown when its upload began and did not end, because the
process was killed or the answer was lost. Such a copy is on offer: it is used while the server does
not answer, and not if the server lacks it. The server may have stored and withdrawn it since.
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
from graphstash._artifacts.withdrawals import Named, Withdrawals
from graphstash._forking import forkable, unforked
from graphstash._http.client import ServerClient
from graphstash._trust.provenance import Provenance
from graphstash.errors import CacheError, RefusedError
from graphstash_schema import ArtifactInfo, ArtifactKey, InvalidValueError, Namespace
from graphstash_schema.names import ListPosition
from graphstash_schema.protocol import MAX_LOOKUP_KEYS

if TYPE_CHECKING:
    from graphstash_schema import LookupResponse

__all__ = ["RECHECK_SECONDS", "Standing", "Verdict"]

_log = logging.getLogger("graphstash")

RECHECK_SECONDS: Final = 600.0
"""How long an answer of the server holds for the processes of a run."""

_RETRY_SECONDS: Final = 30.0
"""How long a process takes a server that did not answer, or refused, for one that does so still."""

_TOUCH_SECONDS: Final = 60.0
"""How often a process notes that it reached the server."""

_MAX_BYTES: Final = 4 * 1024**2
"""Of what the processes of a run tell each other at a time."""

_ABSENT: Final = "-"
_SERVER_LAG_SECONDS: Final = 5.0
"""How long downloads of withdrawn bytes need a look-up. A server may serve an artifact from memory
for two seconds after another server has withdrawn it."""

_WITHHELD: Final = "!"
"""Begins the SHA-256 of an artifact that the server withholds."""

_WITHDRAWN: Final = "~"
"""Begins the SHA-256 of a listed withdrawal. The key may have other bytes now."""

_OUTDATED: Final = "@outdated"
_MOVED: Final = "@moved"
"""Stand for a key, in lines about all answers and about the position in the list."""

_WORD_FORM: Final = re.compile(r"-|[!~]?[0-9a-f]{64}")
"""What the processes of a run tell each other about a key."""

_ORIGIN: Final = "_origin"
"""The file that says which server answered at a URL; no namespace has such a name."""

_ORIGIN_FORM: Final = re.compile(r"(url|server)-[0-9a-f]{16,64}")


class Verdict(Enum):
    """What becomes of a copy."""

    USE = auto()
    LEAVE = auto()
    DELETE = auto()


class Standing:
    """Decides about copies for one process; safe for many threads.

    Args:
        server: asked about them; another one may download.
        tier: where they are.
        run_folder: where the processes of a run share the server's answers; None for one alone.
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
        asked = hashlib.sha256(caller.encode()).hexdigest()[:16]
        self._shared = None if run_folder is None else run_folder / f"answers-{asked}"
        self._read_bytes = 0
        self._is_shared_whole = True
        self._origin = _read_origin(self._folder / _ORIGIN) or f"url-{name}"
        # A signal handler may compile in the same thread.
        self._asking = threading.RLock()
        self._stored: dict[tuple[Namespace, ArtifactKey], tuple[str | None, float]] = {}
        self._withdrawn: dict[tuple[Namespace, ArtifactKey], dict[str, float]] = {}
        self._void_before: dict[Namespace, float] = {}
        self._failed: dict[Namespace, tuple[CacheError, float]] = {}
        self._touched: dict[Namespace, float] = {}
        self._is_told = False
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
        """A number that changes when something was withdrawn that this process may have in memory.

        It includes what other processes of the run have read.
        """
        self._read_shared()
        return self._changes

    @property
    def origin(self) -> str:
        """The origin of copies from this job's server, as this host knows it by its URL."""
        return self._origin

    @property
    def offered(self) -> str:
        """The origin of copies whose upload to this job's server has begun."""
        return f"offer-{self._origin}"

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins of the copies that this job may use."""
        return (self.origin, self.offered, OWN) if self._server.is_configured else (OWN,)

    def has(self, namespace: Namespace, key: ArtifactKey) -> bool:
        """Whether there is a copy; whether it may be used shows when it is."""
        return any(self._tier.has(namespace, key, origin=each) for each in self.origins)

    def verdict(
        self, namespace: Namespace, key: ArtifactKey, proof: Provenance, *, origin: str
    ) -> Verdict:
        """What becomes of a copy.

        Args:
            namespace: where it is from.
            key: what it is found by.
            proof: what lies behind it.
            origin: under which it lies.
        """
        self._read_shared()
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        is_own = origin in (OWN, self.offered)
        if is_own and not self._server.is_configured:
            return Verdict.USE
        needs_leave = self._needs_leave(namespace, proof, origin=origin)
        is_new = 0 <= time() - proof.stored_at < RECHECK_SECONDS
        if is_own and is_new and not needs_leave:
            return Verdict.USE
        try:
            stored = self.stored(namespace, key)
        except CacheError as error:
            if isinstance(error, RefusedError):
                _log.debug("graphstash: no copy of %s is used: %s", namespace, error)
            is_refused = isinstance(error, RefusedError) and error.status < 500
            is_free = is_own or (not is_refused and self._was_reached(namespace))
            return Verdict.USE if is_free and not needs_leave else Verdict.LEAVE
        return self.verdict_of_answer(namespace, key, proof, stored, origin=origin)

    def verdict_of_answer(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        proof: Provenance,
        stored: str | None,
        *,
        origin: str,
    ) -> Verdict:
        """What becomes of a copy, if the server has these bytes, or None, under its key."""
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        if stored == proof.sha256:
            if origin != self.origin:
                self._tier.hand_over(namespace, key, from_origin=origin, to_origin=self.origin)
            return Verdict.USE
        if stored is None:
            return self._verdict_of_unknown(namespace, key, proof, origin=origin)
        is_aside = self._withdrawals.is_set_aside(namespace, proof.stored_at)
        return Verdict.LEAVE if is_aside else Verdict.DELETE

    def _verdict_of_unknown(
        self, namespace: Namespace, key: ArtifactKey, proof: Provenance, *, origin: str
    ) -> Verdict:
        """What becomes of a copy if the server has nothing under its key.

        The list says whether the server had these bytes and withdrew them. If the list does not
        continue, another server may have answered, or one that lost its data.
        """
        is_current = self.is_current(namespace)
        if self._is_withdrawn(namespace, key, proof):
            return Verdict.DELETE
        needs_leave = self._needs_leave(namespace, proof, origin=origin)
        if origin != OWN:
            is_applied = is_current and self._withdrawals.follows(namespace)
            may_return = proof.sha256 and (is_applied or needs_leave)
            return Verdict.LEAVE if may_return else Verdict.DELETE
        # The copy was opened before the list was read, and may have been deleted since.
        is_there = self._tier.has(namespace, key, origin=OWN)
        return Verdict.USE if is_current and is_there and not needs_leave else Verdict.LEAVE

    def _needs_leave(self, namespace: Namespace, proof: Provenance, *, origin: str) -> bool:
        """Whether a copy may be used only if the server has the same bytes."""
        is_imported = proof.is_imported and origin == OWN
        return is_imported or self._withdrawals.is_set_aside(namespace, proof.stored_at)

    def _is_withdrawn(self, namespace: Namespace, key: ArtifactKey, proof: Provenance) -> bool:
        """Whether these bytes were withdrawn after this host got or compiled them."""
        at = self._withdrawn.get((namespace, key), {}).get(proof.sha256)
        return at is not None and proof.stored_at <= at

    def stored(self, namespace: Namespace, key: ArtifactKey) -> str | None:
        """The SHA-256 of what the server has under a key, None for nothing; as old as
        `RECHECK_SECONDS` at most.

        Raises:
            CacheError: the server does not say.
        """
        with forkable(), self._asking, unforked():
            known = self._known(namespace, key)
            if known is None:
                known = self._ask(namespace, key)
            return known[0]

    def note(self, namespace: Namespace, key: ArtifactKey, sha256: str, *, asked_at: float) -> None:
        """The server has just given this, or confirmed that it stored it."""
        self._learn(namespace, key, sha256, asked_at)
        self._share([_line(asked_at, namespace, key, sha256)])
        self._reached(namespace)

    def state(self, namespace: Namespace) -> object:
        """Return a value that is another one if withdrawn copies were deleted meanwhile."""
        return self._withdrawals.state(namespace)

    def confirms(self, namespace: Namespace, key: ArtifactKey, sha256: str) -> bool:
        """Ask the server again, and return whether it has these bytes under a key now."""
        with suppress(CacheError), forkable(), self._asking, unforked():
            return self._ask(namespace, key)[0] == sha256
        return False

    def follow(self, namespace: Namespace, newest: str | None, *, asked_at: float) -> None:
        """Read the server's list if a look-up, requested at a time, says that something is new."""
        self._withdrawals.follow(namespace, newest, asked_at=asked_at)

    def withdrawn(self, namespace: Namespace, named: Named, *, at: float) -> None:
        """See `Listener`."""
        for key, sha256 in named:
            self._learn(namespace, key, f"{_WITHDRAWN}{sha256}", at)
        self._changes += bool(named)
        self._share([_line(at, namespace, key, f"{_WITHDRAWN}{sha256}") for key, sha256 in named])

    def outdated(self, namespace: Namespace, *, before: float, is_for_run: bool) -> None:
        """See `Listener`."""
        self._drop_answers(namespace, before)
        if is_for_run:
            self._share([_line(before, namespace, _OUTDATED, "-")])

    def moved(self, namespace: Namespace, start: ListPosition, end: ListPosition) -> None:
        """See `Listener`."""
        if self._is_shared_whole:  # or the others, which lack withdrawals, read the list themselves
            self._share([_line(time(), namespace, _MOVED, f"{start}/{end}")])

    def _is_void(self, namespace: Namespace, at: float) -> bool:
        """Whether an answer is too old. A limit in the future is from before the clock was set."""
        return at < self._void_before.get(namespace, 0.0) <= time()

    def _drop_answers(self, namespace: Namespace, before: float) -> None:
        self._void_before[namespace] = max(before, self._void_before.get(namespace, 0.0))
        for where, (_, at) in tuple(self._stored.items()):
            if where[0] == namespace and at < before:
                self._stored.pop(where, None)
        self._changes += 1

    def _reached(self, namespace: Namespace) -> None:
        if monotonic() - self._touched.get(namespace, -_TOUCH_SECONDS) < _TOUCH_SECONDS:
            return
        self._touched[namespace] = monotonic()
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if _read_origin(self._folder / _ORIGIN) != self._origin:
                _write(self._folder / _ORIGIN, self._origin)
            _write(self._folder / namespace, "")

    def _was_reached(self, namespace: Namespace) -> bool:
        """Whether this host reached the server within the time for which copies do without it."""
        try:
            at = (self._folder / namespace).stat().st_mtime
        except OSError:
            at = 0.0
        if 0 <= time() - at < self._config.offline_seconds:
            return True
        if not self._is_told:
            self._is_told = True
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
        """Asks for a key, and for what this host has beside it: one request answers for all."""
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
        words = self.take(namespace, batch, reply, asked_at=asked_at)
        word = words[key]
        return None if word == _ABSENT or word.startswith(_WITHHELD) else word, asked_at

    def take(
        self,
        namespace: Namespace,
        batch: Sequence[ArtifactKey],
        reply: "LookupResponse",
        *,
        asked_at: float,
    ) -> Mapping[ArtifactKey, str]:
        """Note the server's answer about these keys, and return it by key."""
        self._reached(namespace)
        words = dict.fromkeys(batch, _ABSENT)
        words |= {each.key: _sha256_of(each) for each in reply.found}
        words |= {each.key: f"{_WITHHELD}{_sha256_of(each)}" for each in reply.withdrawn}
        for each, word in words.items():
            self._learn(namespace, each, word, asked_at)
        self._share([_line(asked_at, namespace, *each) for each in words.items()])
        self.follow(namespace, reply.newest_withdrawal, asked_at=asked_at)
        return words

    def may_publish(self, namespace: Namespace, key: ArtifactKey, proof: Provenance) -> bool:
        """Return whether the server lacks bytes that this host compiled, and never withdrew them.

        The list must be current. A copy on offer whose upload stored nothing is then as good as one
        that was never offered.
        """
        return (
            not self._is_withdrawn(namespace, key, proof)
            and not proof.is_imported
            and not self._withdrawals.is_set_aside(namespace, proof.stored_at)
            and self.stored(namespace, key) is None
        )

    def has_list(self, namespace: Namespace) -> bool:
        """Return whether the server has a list, as far as this process knows."""
        return self._withdrawals.follows(namespace)

    def is_current(self, namespace: Namespace) -> bool:
        """Return whether this process has applied the list. Wait for it within the time limits."""
        patience = self._config.connect_seconds + self._config.first_byte_seconds
        return self._withdrawals.is_current(namespace, wait_seconds=patience)

    def _learn(self, namespace: Namespace, key: ArtifactKey, word: str, at: float) -> None:
        """Keep the newest answer about a key."""
        where = namespace, key
        if word.startswith((_WITHHELD, _WITHDRAWN)):
            withdrawn = self._withdrawn.setdefault(where, {})
            withdrawn[word[1:]] = max(at, withdrawn.get(word[1:], 0.0))
        known = self._stored.get(where)
        if word.startswith(_WITHDRAWN):
            if known is not None and known[1] <= at:
                self._stored.pop(where, None)  # the next use asks what is there now
            return
        if (known is not None and known[1] > at) or self._is_void(namespace, at):
            return
        is_stored = word != _ABSENT and not word.startswith(_WITHHELD)
        if is_stored:
            withdrawn = self._withdrawn.get(where, {})
            if withdrawn.get(word, -_SERVER_LAG_SECONDS) + _SERVER_LAG_SECONDS > at:
                return  # requested before the withdrawal, or of a server that lags behind it
            withdrawn.pop(word, None)
        self._stored[where] = word if is_stored else None, at

    def _batch(self, namespace: Namespace, key: ArtifactKey) -> list[ArtifactKey]:
        """The key, and those that were used last of the same kind and device type."""
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
            with suppress(InvalidValueError):  # what somebody else has put there
                batch[ArtifactKey.parse(key.kind, key.device_type, fingerprint)] = None
        return list(batch)

    def _share(self, lines: Sequence[str]) -> None:
        if self._shared is None:
            return
        text = "".join(("\n", *lines)).encode()  # ends a line that another process left torn
        written = 0
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._shared, flags, 0o600)
            try:
                written = os.write(descriptor, text)  # one write: whole lines
            finally:
                os.close(descriptor)
        self._is_shared_whole &= written == len(text)

    def _read_shared(self) -> None:
        """Reads what other processes of the run were told since the last time."""
        if self._shared is None:
            return
        with suppress(OSError):
            start = self._read_bytes
            if self._shared.stat().st_size in (start, 0):
                return
            with self._shared.open("rb") as file:
                file.seek(start)
                added = file.read(_MAX_BYTES)
            whole = added[: added.rfind(b"\n") + 1]
            self._read_bytes = start + len(whole)  # two threads may have read the same
            for line in filter(None, whole.decode("ascii", "replace").split("\n")):
                try:
                    at, namespace, key, word = line.split(" ")
                    self._learn_line(float(at), Namespace(namespace), key, word)
                except ValueError:
                    self._distrust()

    def _distrust(self) -> None:
        """Ask again about everything: a process was killed while it wrote, or the disk is full.

        The lines that are missing may be withdrawals.
        """
        for namespace in self._config.readable:
            self._withdrawals.forget(namespace)
            self._drop_answers(namespace, time())

    def _learn_line(self, at: float, namespace: Namespace, key: str, word: str) -> None:
        if key == _OUTDATED:
            self._drop_answers(namespace, at)
        elif key == _MOVED:
            self._withdrawals.note_moved(namespace, *map(ListPosition, word.split("/")))
        elif not _WORD_FORM.fullmatch(word):
            raise ValueError(f"torn: {word}")
        else:
            self._learn(namespace, ArtifactKey.parse(*key.split("/")), word, at)
            self._changes += word.startswith(_WITHDRAWN)


def _is_recent(at: float) -> bool:
    """Whether a time of this host's clock is so near that what was known then still holds."""
    return 0 <= time() - at < RECHECK_SECONDS


def _sha256_of(found: ArtifactInfo) -> str:
    return found.digest.partition(":")[2]


def _line(at: float, namespace: Namespace, key: ArtifactKey | str, word: str) -> str:
    return f"{at:.6f} {namespace} {key} {word}\n"


def _read_origin(path: Path) -> str | None:
    try:
        text = path.read_text("ascii")
    except (OSError, ValueError):
        return None
    return text if _ORIGIN_FORM.fullmatch(text) else None


def _write(path: Path, text: str) -> None:
    """Replaces a small file by one write; what a reader may find of a torn one has no valid form.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.utime(descriptor)
    finally:
        os.close(descriptor)
