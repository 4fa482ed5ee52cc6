"""Local tier: this host's disk in front of the server, shared by all its processes.

    <root>/v2/<origin>/<namespace>/<kind>/<device type>/<first 2 hex>/<fingerprint>    envelopes
    <root>/secret                 what this user's own artifacts are told by, see `_proof`
    <root>/locks/<3 hex>.lock     one download per host: taken while an artifact is fetched
    <root>/tmp/                   files that are being written
    <root>/records/               what the last runs missed (`_process.run_record`) and
                                  downloaded (`run_downloads`)
    <root>/servers/               when servers were last reached (`standing`), and how far their
                                  lists were read (`withdrawals`)

An origin is a server, `own` (compiled by this user on this host and not stored on a server), or
`offer-<server>` (compiled here, and an upload to that server has begun). A job gets copies of its
own server only (`standing`). Earlier versions kept envelopes in `v1`,
which does not tell where they came from: nothing there is used, and it is evicted like the rest.

Everything is in directories that only this user can use, and is reached by a descriptor of the root
that was checked: whoever may write to a directory above it can put another one in its place, with
links to this user's files. A file appears by rename, whole or not at all. It is verified on every
read, so that neither a torn write nor a disk that rots reaches a compiler; what does not verify is
removed. The time of last use is the file's mtime, and the least recently used go when the tier is
over its limit.
"""

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import IO, Final, NamedTuple

from filelock import FileLock, Timeout

from graphstash._artifacts.spill import SpillFile
from graphstash._trust.provenance import (
    Provenance,
    append_provenance,
    open_ours,
    read_provenance,
)
from graphstash.errors import LocalTierError
from graphstash_schema import ArtifactKey, InvalidValueError, Namespace
from graphstash_schema.own_files import make_own_directory, open_own_directory

__all__ = ["FOLDERS", "OWN", "Copy", "LocalTier"]

FOLDERS: Final = ("v2", "locks", "tmp", "records", "servers")
"""What a tier consists of, beside its secret."""

_EARLIER_FOLDER: Final = "v1"
"""Envelopes of releases before 0.2."""

OWN: Final = "own"
"""Origin of envelopes that this host compiled and no server has stored, as far as it knows."""

_NO_PROOF: Final = Provenance()

_SECRET_BYTES: Final = 32

_MAX_TROUBLES: Final = 1000

_TOUCH_SECONDS: Final = 0.5
"""How often somebody who downloads tells those who wait."""

_STALE_SECONDS: Final = 24 * 3600.0
"""A temporary file of this age belongs to a process that died."""


class Copy(NamedTuple):
    """An envelope of the tier.

    Attributes:
        path: where it is.
        origin: the server it came from, or `OWN`.
        namespace, key: what it is found by.
    """

    path: Path
    origin: str
    namespace: Namespace
    key: ArtifactKey


class LocalTier:
    """Envelopes on disk.

    Attributes:
        root: where it is, for people.
        troubles: what could not be kept, and why; whoever counts that empties it.

    Args:
        root: made when absent; where it cannot be written, or others can, a private temporary
            directory serves this process alone.
        limit_bytes: soft limit over all envelopes; 0 keeps none of them between jobs.
    """

    def __init__(self, root: Path, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes or 1024**4
        self._added_bytes = 0
        self._owner = os.getpid()
        self._is_private = limit_bytes == 0
        self.troubles: deque[LocalTierError] = deque(maxlen=_MAX_TROUBLES)
        if not self._is_private:
            try:
                self._place = _prepare(root)
            except OSError as error:
                self.troubles.append(
                    LocalTierError(
                        f"{error}: this process keeps nothing on this host; set "
                        "GRAPHSTASH_CACHE_DIR to a directory that only this user can write to"
                    )
                )
                self._is_private = True
        self.root = root
        if self._is_private:
            self.root = Path(tempfile.mkdtemp(prefix="graphstash-"))
            atexit.register(self._remove_private)
            try:
                self._place = _prepare(self.root)
            except OSError:
                self._remove_private()  # at the end once more: it takes descriptors
                raise
        closing = weakref.finalize(self, os.close, int(self._place.name))
        closing.atexit = False  # what is drained at the end of the process still uses it

    def path(self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN) -> Path:
        """Where the envelope of a key is, or would be. Words are checked, so joining is safe."""
        return self._directory_of(namespace, key, origin) / key.fingerprint[:2] / key.fingerprint

    def _directory_of(self, namespace: Namespace, key: ArtifactKey, origin: str) -> Path:
        return self._place / "v2" / origin / namespace / key.kind / key.device_type

    def has(self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN) -> bool:
        """Whether there is an envelope; whether it is sound shows when it is used."""
        return self.path(namespace, key, origin=origin).is_file()

    def keys(self, namespace: Namespace, *, origin: str = OWN) -> Iterator[ArtifactKey]:
        """The keys of a namespace's envelopes, in no order."""
        for path in (self._place / "v2" / origin / namespace).glob("*/*/??/*"):
            kind, device_type, _, fingerprint = path.parts[-4:]
            with contextlib.suppress(InvalidValueError):  # what somebody else has put there
                yield ArtifactKey.parse(kind, device_type, fingerprint)

    def similar(
        self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN
    ) -> Iterator[tuple[float, str]]:
        """The fingerprints of a namespace's envelopes of the same kind and device type, unchecked,
        each after the time of its last use; in no order.
        """
        with contextlib.suppress(OSError):
            for folder in os.scandir(self._directory_of(namespace, key, origin)):
                with contextlib.suppress(OSError):
                    for file in os.scandir(folder):
                        yield file.stat(follow_symlinks=False).st_mtime, file.name

    def copies(self, prefix: str) -> Iterator[Copy]:
        """Every envelope whose fingerprint begins with these characters, two at least, of all
        origins and namespaces; those of earlier versions as well.
        """
        for path in self._paths(f"{prefix[:2]}/{prefix}*"):
            *_, origin, namespace, kind, device_type, _, fingerprint = path.parts
            with contextlib.suppress(InvalidValueError):
                key = ArtifactKey.parse(kind, device_type, fingerprint)
                yield Copy(path, origin, Namespace(namespace), key)

    def _paths(self, pattern: str) -> Iterator[Path]:
        yield from (self._place / "v2").glob(f"*/*/*/*/{pattern}")
        yield from (self._place / _EARLIER_FOLDER).glob(f"*/*/*/{pattern}")

    def server_folder(self, name: str) -> Path:
        """Where this host notes when it reached a server."""
        return self._place / "servers" / name

    def run_folder(self, run: str) -> Path:
        """Where the processes of a run leave what they tell each other."""
        return self._place / "records" / run

    def open(
        self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN
    ) -> IO[bytes] | None:
        """Opens an envelope for reading, or gives None; an open one survives its eviction."""
        path = self.path(namespace, key, origin=origin)
        try:
            file = open_ours(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure(path, error) from error
        with contextlib.suppress(OSError):  # the time of last use is only a hint
            os.utime(file.fileno())
        return file

    @property
    def is_private(self) -> bool:
        """Whether nothing of it outlives this process."""
        return self._is_private

    @contextmanager
    def temporary(self) -> Iterator[SpillFile]:
        """A file to write and read, on the tier's own file system while that has room; removed
        unless it was adopted.

        Raises:
            LocalTierError: no place takes a file.
        """
        try:
            file = SpillFile(self._place / "tmp")
        except OSError as error:
            raise self._failure(self.root, error) from error
        try:
            with file:
                yield file
        finally:
            file.remove()

    def adopt(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        envelope: SpillFile,
        *,
        origin: str = OWN,
        proof: Provenance = _NO_PROOF,
    ) -> bool:
        """Takes a whole, verified envelope over; it is visible at once and complete.

        False when the disk refuses, which `troubles` tells: who has the bytes goes on with them.

        Args:
            namespace: where it came from, or was made for.
            key: what it is found by.
            envelope: what `temporary` gave; its file moves, and stays open.
            origin: the server it came from.
            proof: is kept behind it.
        """
        # Jobs that are killed never come to `close`, so a long one keeps to the limit by itself. It
        # does so before the new one comes, because whoever adopts it goes on to use it.
        if self._added_bytes > self._limit_bytes / 16:
            self.evict()
        path = self.path(namespace, key, origin=origin)
        try:
            append_provenance(envelope, proof)
            if envelope.trouble is not None:
                raise envelope.trouble
            size = os.fstat(envelope.fileno()).st_size
            path.parent.mkdir(parents=True, exist_ok=True)
            Path(envelope.name).replace(path)
        except OSError as error:
            self.troubles.append(self._failure(path, error))
            return False
        self._added_bytes += size
        return True

    def discard(self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN) -> None:
        """Removes an envelope that turned out to be bad, or that its server withdrew."""
        with contextlib.suppress(OSError):
            self.path(namespace, key, origin=origin).unlink()

    def discard_if(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        is_unwanted: Callable[[Provenance], bool],
        *,
        origin: str,
    ) -> None:
        """Remove an envelope whose provenance says that it is unwanted, and change no other."""
        with contextlib.suppress(OSError):
            with open_ours(self.path(namespace, key, origin=origin)) as file:
                proof, _ = read_provenance(file)
            if is_unwanted(proof):
                self.discard(namespace, key, origin=origin)

    def hand_over(
        self, namespace: Namespace, key: ArtifactKey, *, from_origin: str, to_origin: str
    ) -> None:
        """Move an envelope to another origin: a server has stored or refused it."""
        target = self.path(namespace, key, origin=to_origin)
        with contextlib.suppress(OSError):  # the tier evicted it, or cannot be written to
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path(namespace, key, origin=from_origin).replace(target)

    def secret(self) -> bytes | None:
        """32 random bytes that only this user can read, made when absent; None without such."""
        path = self._place / "secret"
        try:
            size = _size_of(path)
            if size not in (None, _SECRET_BYTES):  # what a power cut has left of it
                path.unlink(missing_ok=True)
            if size != _SECRET_BYTES:
                with contextlib.suppress(FileExistsError), self.temporary() as made:
                    made.write(secrets.token_bytes(_SECRET_BYTES))
                    os.link(made.name, path)  # whole or not at all, and never over another one
            with open_ours(path) as file:
                status = os.fstat(file.fileno())
                secret = file.read(_SECRET_BYTES + 1)
        except (OSError, LocalTierError):  # a file system without links, a disk that is full
            return None
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return secret if is_ours and len(secret) == _SECRET_BYTES else None

    @contextmanager
    def exclusive(
        self, key: ArtifactKey, *, timeout_seconds: float, most_seconds: float = 0.0
    ) -> Iterator[Callable[[], None]]:
        """Keeps other processes of this host from fetching the same artifact meanwhile.

        When the time is over, or the file system knows no locks, it goes on without: two downloads
        are a waste, not a fault.

        Args:
            key: what is fetched.
            timeout_seconds: how long to wait for one that says nothing.
            most_seconds: how long to wait for one that says again and again that it goes on.

        Returns:
            Says that this one goes on.
        """
        path = self._place / "locks" / f"{key.fingerprint[:3]}.lock"
        goes_on = path.with_suffix(".on")  # whoever tries to take the lock touches its own file
        lock = FileLock(path, timeout=timeout_seconds)
        until = monotonic() + most_seconds
        is_held = False
        while not is_held:
            try:
                lock.acquire(poll_interval=0.02)
                is_held = True
            except Timeout:
                if monotonic() > until or not _is_younger(goes_on, timeout_seconds):
                    break
            except (OSError, NotImplementedError):
                break
        try:
            yield _touching(goes_on) if is_held else lambda: None
        finally:
            lock.release()

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """While some process of this host downloads what is needed now, prefetching makes room."""
        with self._opened_lock() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def is_downloading(self) -> bool:
        """Whether any does."""
        with self._opened_lock() as descriptor:
            if descriptor is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
        return False

    @contextmanager
    def _opened_lock(self) -> Iterator[int | None]:
        """The descriptor of the lock's file, by which it is released; None where there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._place / "locks" / "downloading", flags, 0o600)
        except OSError:
            yield None
            return
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):  # a forked child has a copy of the descriptor
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def size_bytes(self) -> int:
        """Bytes of all envelopes, by looking at each."""
        return sum(size for _, size, _ in self._envelopes())

    def evict(self) -> int:
        """Removes the least recently used envelopes until the tier is at 90 % of its limit.

        Does nothing while another process of this host is at it: two that count apart would remove
        twice as much.

        Returns:
            How many bytes were removed.
        """
        self._added_bytes = 0
        try:
            with FileLock(self._place / "locks" / "evict", timeout=0):
                return self._evict()
        except (Timeout, OSError, NotImplementedError):
            return 0

    def _evict(self) -> int:
        self._remove_stale()
        found = sorted(self._envelopes(), key=lambda entry: entry[2])
        total = sum(size for _, size, _ in found)
        removed = 0
        if total > self._limit_bytes:
            for path, size, _ in found:
                if total - removed <= self._limit_bytes * 0.9:
                    break
                with contextlib.suppress(PermissionError):
                    path.unlink(missing_ok=True)
                    removed += size
        return removed

    def close(self) -> None:
        """Evicts when this process added anything; removes a private tier."""
        if self._is_private:
            self._remove_private()
        elif self._added_bytes:
            self.evict()

    def _failure(self, path: Path, error: OSError) -> LocalTierError:
        return LocalTierError(f"{path}: {error}".replace(str(self._place), str(self.root)))

    def _remove_private(self) -> None:
        if self._owner == os.getpid():  # a forked child leaves it to its parent
            shutil.rmtree(self.root, ignore_errors=True)

    def _envelopes(self) -> Iterator[tuple[Path, int, float]]:
        for path in self._paths("??/*"):
            with contextlib.suppress(OSError):  # another process evicts at the same time
                status = path.stat()
                yield path, status.st_size, status.st_mtime

    def _remove_stale(self) -> None:
        oldest = time() - _STALE_SECONDS
        for path in (self._place / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest and path.is_file():
                    path.unlink()


def _is_younger(path: Path, seconds: float) -> bool:
    """Whether a file was touched within the last seconds."""
    try:
        return time() - path.stat().st_mtime < seconds
    except OSError:
        return False


def _touching(path: Path) -> Callable[[], None]:
    """Touches a file, twice per second at most."""
    touched = 0.0

    def touch() -> None:
        nonlocal touched
        if monotonic() - touched > _TOUCH_SECONDS:
            touched = monotonic()
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o600)
                os.utime(descriptor)
                os.close(descriptor)

    return touch


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def _prepare(root: Path) -> Path:
    """Makes the folders of a tier, and closes them to others.

    Returns:
        The root by a descriptor of it, which stays open.

    Raises:
        OSError: this user cannot write to all of them, or others can.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if {each.name for each in root.iterdir()} <= {*FOLDERS, _EARLIER_FOLDER, "secret"}:
        descriptor = make_own_directory(root)
    else:  # not for us to close; nobody else may put folders there
        descriptor = open_own_directory(root, open_to_others=0o055)
    place = Path(f"/proc/self/fd/{descriptor}")
    has_earlier = os.path.lexists(place / _EARLIER_FOLDER)
    try:
        for name in (*FOLDERS, _EARLIER_FOLDER) if has_earlier else FOLDERS:
            os.close(make_own_directory(place / name))
            with tempfile.TemporaryFile(dir=place / name):
                pass
    except OSError as error:
        os.close(descriptor)
        raise OSError(str(error).replace(str(place), str(root))) from None
    return place
