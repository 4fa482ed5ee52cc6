"""Withdrawals: this process follows a server's lists of withheld, deleted and replaced artifacts.

Each look-up response has the newest position of a namespace's list. If this process is at another
position, a background thread reads the entries in between, deletes the copies that they name, and
then writes the position to `<tier>/servers/<server>/_withdrawals/<namespace>`.

The list may not continue at this host's position: the host was away for longer than the server
keeps entries, the server's database was restored from a backup, or another server answers at the
URL. Then this host sets its copies aside: they stay on the disk, but a job uses one only if the
server has the same bytes. If the list later continues at the old position after all, those copies
are used as before, and the host sets the copies aside that it stored in between.
"""

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from graphstash._artifacts.local_tier import LocalTier
from graphstash._forking import forkable, unforked
from graphstash._http.client import ServerClient
from graphstash._replacing import replacing
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, LocalTierError
from graphstash_schema import ArtifactKey, InvalidValueError, Namespace
from graphstash_schema.names import LIST_START, ListPosition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphstash._trust.proof import Provenance
    from graphstash_schema.withdrawals import WithdrawalList

__all__ = ["HostPositions", "Listener", "Named", "Withdrawals"]

_log = logging.getLogger("graphstash")

_MAX_READ: Final = 5_000
"""Maximum number of new entries. If there are more, this host sets its copies aside instead."""

_MAX_PAGES: Final = 20
"""Maximum number of pages that one thread reads. A page has at most a thousand entries."""

_RETRY_SECONDS: Final = 30.0
"""Seconds from a failed read to the next."""

_GAP: Final = "_gap-"
"""Prefix of the file with a namespace's `Gap`."""

_CHANGE: Final = "_change-"
"""Prefix of a file whose content changes before copies of a namespace are deleted."""

Named: TypeAlias = Sequence[tuple[ArtifactKey, str]]
"""Withdrawn artifacts, each with the SHA-256 of its blob."""


class Gap(NamedTuple):
    """A part of a list that this host could not read.

    Attributes:
        position: where the list did not continue. None if it was never read, or continues again.
        start, end: Unix times. Copies stored between them are set aside.
    """

    position: ListPosition | None
    start: float
    end: float


class HostPositions:
    """This host's positions in the lists of one server. Files are replaced atomically."""

    def __init__(self, tier: LocalTier, server_folder: Path) -> None:
        self._folder = server_folder / "_withdrawals"
        self._root, self._path = tier.relative(self._folder)

    def read(self, namespace: Namespace) -> ListPosition | None:
        """Return the position in a namespace's list, or None if there is none."""
        try:  # on every download, where `suppress` takes twice the time
            return ListPosition(self._text(namespace))
        except (OSError, ValueError):
            return None

    def write(self, namespace: Namespace, position: ListPosition) -> None:
        """Replace the position in a namespace's list.

        A slower process may write an earlier position. That is safe: the next run applies the same
        withdrawals again.
        """
        with suppress(OSError):
            self._replace(namespace, position)

    def gap(self, namespace: Namespace) -> Gap | None:
        """Return the gap of a namespace, or None if there is none."""
        try:
            position, start, end = self._text(_GAP + namespace).split()
            known = None if position == "-" else ListPosition(position)
            return Gap(known, float(start), float(end))
        except (OSError, ValueError):
            return None

    def write_gap(self, namespace: Namespace, gap: Gap) -> None:
        """Replace the gap of a namespace.

        Raises:
            OSError: the gap was not written, so the position must not be written.
        """
        self._replace(_GAP + namespace, f"{gap.position or '-'} {gap.start!r} {gap.end!r}")

    def announce(self, namespace: Namespace) -> None:
        """Change `deletion_mark`. Call it before deleting withdrawn copies."""
        with suppress(OSError):  # a full disk must not prevent the deletion
            self._replace(_CHANGE + namespace, secrets.token_hex(8))

    def deletion_mark(self, namespace: Namespace) -> tuple[ListPosition, str]:
        """Return a value that changes when copies may have been deleted.

        If it changes during a download, the downloaded artifact may be a withdrawn one.
        """
        try:
            change = self._text(_CHANGE + namespace)
        except (OSError, ValueError):
            change = ""
        return self.read(namespace) or LIST_START, change

    def _text(self, name: str) -> str:
        """Read a file of at most 4,096 bytes. pathlib takes five times as long, and the kernel
        takes three times as long for a path through /proc, as that of the folder.
        """
        path = f"{self._path}/{name}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root)
        try:
            return os.read(descriptor, 4096).decode("ascii")
        finally:
            os.close(descriptor)

    def _replace(self, name: str, text: str) -> None:
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with replacing(self._folder / name, is_durable=False) as file:
            file.write(text)


class Listener(Protocol):
    """Holds a server's answers in memory."""

    def on_withdrawn(self, namespace: Namespace, named: Named, *, at: float) -> None:
        """Stop using artifacts with these digests, if they were received before `at`."""

    def on_outdated(self, namespace: Namespace, *, before: float, is_for_run: bool) -> None:
        """Drop answers requested before a time, in this process or in all processes of the run."""

    def on_moved(self, namespace: Namespace, start: ListPosition, end: ListPosition) -> None:
        """Record that the run has received all withdrawals between two positions."""


class Withdrawals:
    """Follows the lists of one server for one process. Thread-safe, and usable in a forked child.

    Args:
        origins: returns the origins of copies that the lists apply to. The server's own is first.
    """

    def __init__(
        self,
        config: ClientConfig,
        tier: LocalTier,
        server_folder: Path,
        *,
        origins: Callable[[], Sequence[str]],
        listener: Listener,
    ) -> None:
        self._config = config
        self._tier = tier
        self._host = HostPositions(tier, server_folder)
        self._origins = origins
        self._listener = listener
        self._lock = threading.RLock()  # guards the fields below
        self._positions: dict[Namespace, ListPosition] = {}
        self._newest: dict[Namespace, ListPosition] = {}
        self._readers: dict[Namespace, threading.Thread] = {}
        self._reading: set[Namespace] = set()  # namespaces whose reader is not at the end
        self._failed_at: dict[Namespace, float] = {}
        self._slow: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def follow(self, namespace: Namespace, newest: str | None, *, asked_at: float) -> None:
        """Read the list in the background if a look-up's response has a new position. A server
        without lists has none.
        """
        position = None
        with suppress(InvalidValueError):
            position = None if newest is None else ListPosition(newest)
        with self._locked():
            if position is None:
                self._newest.pop(namespace, None)
                return
            self._newest[namespace] = position
            if namespace not in self._positions:
                self._begin(namespace, position)
                # Another run may have applied withdrawals, so older answers may be stale.
                self._listener.on_outdated(namespace, before=asked_at, is_for_run=False)
            if self._positions.get(namespace) != position:
                self._start(namespace)

    def is_current(self, namespace: Namespace, *, wait_seconds: float = 0.0) -> bool:
        """Return whether this process is at the newest position that the server has reported.

        First wait for the reader thread, unless an earlier wait for it timed out.
        """
        reader = self._readers.get(namespace)
        if wait_seconds and reader is not None and reader not in self._slow:
            with forkable():
                reader.join(wait_seconds)
            if reader.is_alive():
                self._slow.add(reader)
        newest = self._newest.get(namespace)
        return newest is None or self._positions.get(namespace) == newest

    def follows(self, namespace: Namespace) -> bool:
        """Return whether the latest look-up of this process reported a list of withdrawals."""
        return namespace in self._newest

    def is_set_aside(self, namespace: Namespace, stored_at: float) -> bool:
        """Return whether a copy stored at a time is set aside, because the list has a gap.

        A time in the future is from a wrong clock, so the copy may be from the gap.
        """
        gap = self._host.gap(namespace)
        if gap is None:
            return False
        return gap.start <= stored_at < gap.end or stored_at > time()

    def deletion_mark(self, namespace: Namespace) -> object:
        """Return a value that changes when copies may have been deleted."""
        return self._host.deletion_mark(namespace)

    def forget(self, namespace: Namespace) -> None:
        """Start over at the next look-up: this process may have missed withdrawals."""
        with self._locked():
            self._positions.pop(namespace, None)

    def note_moved(self, namespace: Namespace, start: ListPosition, end: ListPosition) -> None:
        """Advance as another process of the run did, if this process is at the same start."""
        with self._locked():
            if self._positions.get(namespace) == start:
                self._positions[namespace] = end

    @contextmanager
    def _locked(self) -> "Iterator[None]":
        """Hold the lock and delay forks: a child would inherit a lock that is never released."""
        with unforked(), self._lock:
            yield

    def _begin(self, namespace: Namespace, newest: ListPosition) -> None:
        """Start at this host's position. If it has none, start at the end of the list, but only if
        the host has no copies that the list might name.
        """
        applied = self._host.read(namespace)
        if applied is None:
            copies = (self._tier.keys(namespace, origin=each) for each in self._origins())
            if newest == LIST_START or all(next(found, None) is None for found in copies):
                self._host.write(namespace, newest)
                applied = newest
        if applied is not None:
            self._positions[namespace] = applied

    def _start(self, namespace: Namespace) -> None:
        reader = self._readers.get(namespace)
        is_reading = namespace in self._reading and reader is not None and reader.is_alive()
        failed_at = self._failed_at.get(namespace, -_RETRY_SECONDS)
        if is_reading or monotonic() - failed_at < _RETRY_SECONDS:
            return
        self._reading.add(namespace)
        reader = threading.Thread(
            target=self._read, args=(namespace,), name="graphstash-withdrawals", daemon=True
        )
        with suppress(RuntimeError):  # raised at the thread limit and at the process's end
            reader.start()
            self._readers[namespace] = reader

    def _read(self, namespace: Namespace) -> None:
        """Apply the list to its end. Outermost frame of a thread."""
        try:
            with unforked():
                self._read_pages(namespace)
        except Exception as error:  # noqa: BLE001 - outermost frame of a thread: the job goes on
            is_expected = isinstance(error, CacheError)
            _log.debug("graphstash: withdrawals: %s", error, exc_info=not is_expected)
            with self._locked():
                self._failed_at[namespace] = monotonic()
                self._reading.discard(namespace)

    def _read_pages(self, namespace: Namespace) -> None:
        server = ServerClient(self._config)  # its failures do not pause the job's requests
        try:
            for _ in range(_MAX_PAGES):
                if not self._read_page(server, namespace):
                    return
            raise ValueError(f"the list of {self._config.url} does not end")
        finally:
            server.close()

    def _read_page(self, server: ServerClient, namespace: Namespace) -> bool:
        """Apply one page of the list. Return False at its end."""
        with self._locked():
            known, newest = self._positions.get(namespace), self._newest.get(namespace)
            if newest is None or newest == known:
                self._reading.discard(namespace)
                return False
        position, gap = known or LIST_START, self._host.gap(namespace)
        page = returned = None
        if gap is not None and gap.position is not None:
            page = returned = self._page(server, namespace, gap.position, newest)
        page = page or self._page(server, namespace, position, newest)
        if page is None:
            reached = end = newest
            self._set_aside(namespace, known, newest)
        else:
            reached, end = page.position, page.newest
            self._apply(namespace, page)
        with self._locked():
            self._host.write(namespace, reached)
            self._positions[namespace] = reached
            self._listener.on_moved(namespace, position, reached)
            # A look-up may have reported a newer position meanwhile.
            if self._newest.get(namespace) == newest:
                self._newest[namespace] = end
        if gap is not None and returned is not None:
            # The old list is back. Answers from the gap may be those of another server.
            self._listener.on_outdated(namespace, before=time(), is_for_run=True)
            self._host.write_gap(namespace, Gap(None, gap.end, time()))
        return True

    def _page(
        self, server: ServerClient, namespace: Namespace, after: ListPosition, newest: ListPosition
    ) -> "WithdrawalList | None":
        """Return the page after a position, or None if the list does not continue there or has too
        many new entries.
        """
        if newest.number - after.number > _MAX_READ:
            return None
        from graphstash_schema.withdrawals import WithdrawalQuery

        page = server.withdrawals(WithdrawalQuery(after=after), namespace=namespace)
        if not page.is_complete:
            return None
        if page.position.number <= after.number and page.position != page.newest:
            raise ValueError(f"{self._config.url} repeats {after} of its list")
        return page

    def _apply(self, namespace: Namespace, page: "WithdrawalList") -> None:
        named = []
        for each in page.withdrawals:
            with suppress(InvalidValueError, TypeError):  # a kind of a later release
                key = ArtifactKey.parse(*each.key.split("/"))
                named.append((key, each.digest.partition(":")[2]))
        self._host.announce(namespace)
        # Memory first: until a file is deleted, another thread may open it.
        self._listener.on_withdrawn(namespace, named, at=time())
        failure: LocalTierError | None = None
        for key, sha256 in named:
            is_withdrawn = partial(_has_digest, sha256=sha256)
            for origin in self._in_order_of_moves():
                try:
                    self._tier.discard_if(namespace, key, is_withdrawn, origin=origin)
                except LocalTierError as error:
                    failure = error
        if failure is not None:  # the position stays, so that the deletion is repeated
            raise failure

    def _in_order_of_moves(self) -> tuple[str, ...]:
        """Return the origins. Another process can only move a copy to a later one."""
        of_server, *unpublished = self._origins()
        return (*unpublished, of_server)

    def _set_aside(
        self, namespace: Namespace, known: ListPosition | None, newest: ListPosition
    ) -> None:
        """Write a gap: the list does not continue at this host's position."""
        if known is not None:
            _log.warning(
                "graphstash: the withdrawals of namespace %s at %s do not continue where this host "
                "has read them (%d, now %d): it was away for too long, the server was restored "
                "from a backup, or another server answers; copies on this host's disk are used "
                "only if the server has them",
                namespace,
                self._config.url,
                known.number,
                newest.number,
            )
        now = time()
        self._host.announce(namespace)
        self._host.write_gap(namespace, Gap(known, 0.0, now))
        self._listener.on_outdated(namespace, before=now, is_for_run=True)


def _has_digest(proof: "Provenance", *, sha256: str) -> bool:
    """Return whether a copy has this digest, or no recorded digest."""
    return proof.sha256 in ("", sha256)
