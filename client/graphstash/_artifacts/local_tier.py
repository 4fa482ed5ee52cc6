"""Local tier: this host's disk in front of the server, shared by all its processes.

    <root>/v2/<origin>/<namespace>/<kind>/<device type>/<first 2 hex>/<fingerprint>    envelopes
    <root>/secret                 key of this user's own MACs, see `_proof`
    <root>/locks/<3 hex>.lock     held while an artifact is fetched: one download per host
    <root>/tmp/                   unfinished files
    <root>/records/               by run: misses (`run_record`), downloads (`run_downloads`)
    <root>/servers/               by server: time of the last contact (`standing`), positions in its
                                  lists (`withdrawals`), artifacts still to upload (`unsent`)

An origin is a server, `own` (compiled on this host or imported from a bundle, and not known to be
on a server), or `offer-<server>` (compiled here, and an upload to that server has begun). A job
uses no copies of another server (`standing`). Releases before 0.2 kept envelopes in `v1` without
their origin. The tier does not use them, but evicts them like others.

Only this user can use the directories. The tier reaches them by a descriptor of the checked root: a
user who may write to a parent directory could replace the root by one with links to this user's
files. A file appears by rename, whole or not at all. Readers verify an envelope on every read and
discard it if it is damaged, so a torn write or a failing disk cannot reach a compiler. A file's
mtime is the time of last use. Over its limit, the tier evicts the least recently used files.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from pathlib import Path
from time import monotonic, sleep, time
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from graphstash._artifacts.spill import SpillFile
from graphstash._forking import close_unshared, forkable, open_unshared
from graphstash._held_folder import hold, remove_abandoned
from graphstash._regular_file import open_ours
from graphstash._trust.provenance import append_provenance, read_provenance
from graphstash.errors import LocalTierError
from graphstash_schema import ArtifactKey, InvalidValueError, Namespace
from graphstash_schema.own_files import make_own_directory, open_own_directory

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance

__all__ = ["FOLDERS", "OWN", "STALE_SECONDS", "Copy", "LocalTier"]

FOLDERS: Final = ("v2", "locks", "tmp", "records", "servers")
"""Folders of a tier, beside its secret."""

_EARLIER_FOLDER: Final = "v1"
"""Envelopes of releases before 0.2."""

OWN: Final = "own"
"""Origin of envelopes, compiled here or imported, that no server is known to have stored."""

_SECRET_BYTES: Final = 32

_SECRET_SECONDS: Final = 2.0
"""Seconds to wait for another process that creates the secret."""

_MAX_TROUBLES: Final = 1000

_TOUCH_SECONDS: Final = 0.5
"""Seconds between two signals of a downloading process to waiting processes."""

_QUIET_SECONDS: Final = 0.1
"""Seconds before the first signal, which waiting processes need only after seconds. Most downloads
end earlier and create no signal file, which on ext4 takes as much CPU time as the response."""

_RECENT_SECONDS: Final = 2.0
"""Age up to which any signal is recent. A process may signal only once per second."""

_ENDLESS: Final = 3600
"""Seconds in a signal (the size of its file) that stand for a wait without a limit."""

_LOCK_POLL_SECONDS: Final = 0.02

STALE_SECONDS: Final = 24 * 3600.0
"""Age in seconds from which a temporary file is removed, unless a process holds it."""

_PRIVATE: Final = "graphstash-private-"

_MAX_AHEAD_SECONDS: Final = 3600.0
"""Seconds that a time of last use may be ahead of now. A later time is from a wrong clock."""


_FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""


class Copy(NamedTuple):
    """An envelope of the tier.

    Attributes:
        path: path of the file.
        origin: origin, or `v1` for an envelope of a release before 0.2.
        namespace, key: namespace and key of the artifact.
    """

    path: Path
    origin: str
    namespace: Namespace
    key: ArtifactKey


class LocalTier:
    """Envelopes on disk.

    Attributes:
        root: path of the tier, for messages.
        is_private: whether the tier is a temporary directory of this process.
        troubles: reasons of failed writes. The caller that counts them clears the list.

    Args:
        root: path, created if absent. If this user cannot write to it, or other users can, a
            private temporary directory serves this process alone.
        limit_bytes: soft limit of all envelopes. 0 keeps none of them between jobs.
    """

    def __init__(self, root: Path, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes or 1024**4
        self._added_bytes = 0
        self._owner = os.getpid()
        self.is_private = limit_bytes == 0
        self.troubles: deque[LocalTierError] = deque(maxlen=_MAX_TROUBLES)
        if not self.is_private:
            try:
                self._place = _prepare(root)
            except OSError as error:
                self.troubles.append(
                    LocalTierError(
                        f"{error}: this process keeps nothing on this host; set "
                        "GRAPHSTASH_CACHE_DIR to a directory that only this user can write to"
                    )
                )
                self.is_private = True
        self.root = root
        if self.is_private:
            remove_abandoned(_PRIVATE)
            self.root = Path(tempfile.mkdtemp(prefix=_PRIVATE))
            atexit.register(self._remove_private)
            try:
                self._place = _prepare(self.root)
            except OSError:
                self._remove_private()  # again at exit: it needs free descriptors
                raise
        self._root = int(self._place.name)
        held = hold(self.root) if self.is_private else None
        for descriptor in (self._root, held):
            if descriptor is not None:
                closing = weakref.finalize(self, os.close, descriptor)
                closing.atexit = False  # work drained at exit still uses the directory

    def path(self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN) -> Path:
        """Return the path of a key's envelope. Keys are validated, so the path is safe."""
        return self._place / self._path_of(namespace, key, origin)

    def _path_of(self, namespace: Namespace, key: ArtifactKey, origin: str) -> str:
        fingerprint = key.fingerprint
        return f"{self._directory_of(namespace, key, origin)}/{fingerprint[:2]}/{fingerprint}"

    def _directory_of(self, namespace: Namespace, key: ArtifactKey, origin: str) -> str:
        # Text relative to the root, because a download needs eight: pathlib takes ten times
        # as long, and the kernel needs three times as long for a path through /proc.
        return f"v2/{origin}/{namespace}/{key.kind}/{key.device_type}"

    def has(self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN) -> bool:
        """Return whether an envelope exists. Its content may be damaged."""
        return self.path(namespace, key, origin=origin).is_file()

    def keys(self, namespace: Namespace, *, origin: str = OWN) -> Iterator[ArtifactKey]:
        """Yield the keys of a namespace's envelopes, unordered."""
        for path in (self._place / "v2" / origin / namespace).glob("*/*/??/*"):
            kind, device_type, _, fingerprint = path.parts[-4:]
            with contextlib.suppress(InvalidValueError):  # a foreign file
                yield ArtifactKey.parse(kind, device_type, fingerprint)

    def similar(
        self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN
    ) -> Iterator[tuple[float, str]]:
        """Yield time of last use and fingerprint of a namespace's envelopes of the same kind and
        device type. They are unordered, and the fingerprints are not validated.
        """
        with contextlib.suppress(OSError):
            for folder in os.scandir(self._place / self._directory_of(namespace, key, origin)):
                with contextlib.suppress(OSError):
                    for file in os.scandir(folder):
                        yield file.stat(follow_symlinks=False).st_mtime, file.name

    def copies(self, prefix: str) -> Iterator[Copy]:
        """Yield every envelope whose fingerprint begins with these two or more characters, of all
        origins, namespaces and earlier versions.
        """
        for path in self._paths(f"{prefix[:2]}/{prefix}*"):
            *_, origin, namespace, kind, device_type, _, fingerprint = path.parts
            with contextlib.suppress(InvalidValueError):
                key = ArtifactKey.parse(kind, device_type, fingerprint)
                yield Copy(path, origin, Namespace(namespace), key)

    def _paths(self, pattern: str) -> Iterator[Path]:
        yield from (self._place / "v2").glob(f"*/*/*/*/{pattern}")
        yield from (self._place / _EARLIER_FOLDER).glob(f"*/*/*/{pattern}")

    def server_folder(self, url: str) -> Path:
        """Return the folder of this host's files about a server."""
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        return self._place / "servers" / name

    def relative(self, path: Path) -> tuple[int, str]:
        """Return a path in the tier as a descriptor of the root and the part from there."""
        return self._root, str(path.relative_to(self._place))

    def run_folder(self, run: str) -> Path:
        """Return the folder that the processes of a run share."""
        return self._place / "records" / run

    def open(
        self, namespace: Namespace, key: ArtifactKey, *, origin: str = OWN
    ) -> IO[bytes] | None:
        """Open an envelope for reading, or return None. An open envelope survives its eviction."""
        try:
            file = open_ours(self._path_of(namespace, key, origin), directory=self._root)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure(self.path(namespace, key, origin=origin), error) from error
        with contextlib.suppress(OSError):  # the time of last use is a hint
            os.utime(file.fileno())
        return file

    def temporary(self) -> SpillFile:
        """Return a file to write and read. Closing removes it unless it was adopted."""
        return SpillFile(self._root)

    def adopt(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        envelope: SpillFile,
        *,
        origin: str = OWN,
        proof: "Provenance | None" = None,
    ) -> bool:
        """Move a complete, verified envelope into the tier, where it appears at once.

        Return False if the disk refuses, and add the reason to `troubles`. The caller still has the
        bytes.
        """
        # A killed job never calls `close`, so a long job enforces the limit here. Evict before
        # adopting, because the caller continues to use the new envelope.
        if self._added_bytes > self._limit_bytes / 16:
            self.evict()
        path = self._path_of(namespace, key, origin)
        try:
            append_provenance(envelope, proof)
            size = envelope.seek(0, os.SEEK_END)
            try:
                envelope.rename(path)
            except FileNotFoundError:
                (self._place / path).parent.mkdir(parents=True, exist_ok=True)
                envelope.rename(path)
        except OSError as error:
            self.troubles.append(self._failure(self._place / path, error))
            return False
        self._added_bytes += size
        return True

    def discard(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        *,
        origin: str = OWN,
        opened: IO[bytes] | None = None,
    ) -> None:
        """Remove an envelope that is bad or that its server has withdrawn.

        If `opened` is given, remove only this file, not one that has replaced it meanwhile.
        """
        path = self.path(namespace, key, origin=origin)
        with contextlib.suppress(OSError):
            if opened is None or os.path.samestat(os.fstat(opened.fileno()), path.lstat()):
                path.unlink()

    def discard_if(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        is_unwanted: "Callable[[Provenance], bool]",
        *,
        origin: str,
    ) -> None:
        """Remove an envelope if `is_unwanted` returns true for its provenance.

        Raises:
            LocalTierError: the envelope may still exist. `troubles` has the same error.
        """
        path = self.path(namespace, key, origin=origin)
        try:
            with open_ours(path) as file:
                proof, _ = read_provenance(file)
            if is_unwanted(proof):
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            trouble = self._failure(path, error)
            self.troubles.append(trouble)
            raise trouble from error

    def change_origin(
        self, namespace: Namespace, key: ArtifactKey, *, from_origin: str, to_origin: str
    ) -> None:
        """Move an envelope to another origin: the server has stored it, or lacks it."""
        target = self.path(namespace, key, origin=to_origin)
        with contextlib.suppress(OSError):  # evicted, or the tier is not writable
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path(namespace, key, origin=from_origin).replace(target)

    def secret(self) -> bytes | None:
        """Return the tier's secret, or None if it cannot be kept safely. Create it at first use."""
        from filelock import FileLock

        path = self._place / "secret"
        try:
            if _size_of(path) != _SECRET_BYTES:
                # Otherwise a process could remove the secret that another has just created.
                with FileLock(self._place / "locks" / "secret", timeout=_SECRET_SECONDS):
                    self._create_secret(path)
            with open_ours(path) as file:
                status = os.fstat(file.fileno())
                secret = file.read(_SECRET_BYTES + 1)
        except (OSError, NotImplementedError, LocalTierError):
            return None  # for example a file system without links or locks, or a full disk
        is_ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return secret if is_ours and len(secret) == _SECRET_BYTES else None

    def _create_secret(self, path: Path) -> None:
        size = _size_of(path)
        if size not in (None, _SECRET_BYTES):  # truncated by a power failure
            path.unlink(missing_ok=True)
        if size != _SECRET_BYTES:
            with contextlib.suppress(FileExistsError), self.temporary() as made:
                made.write(secrets.token_bytes(_SECRET_BYTES))
                made.link(path)  # atomic, and never over an existing secret

    @contextmanager
    def exclusive(
        self,
        key: ArtifactKey,
        *,
        timeout_seconds: float,
        most_seconds: float = 0.0,
        when_busy: Callable[[float], bool] = lambda _: False,
    ) -> Iterator[Callable[..., None]]:
        """Keep other processes of this host from fetching the same artifact.

        After the timeout, or on a file system without locks, continue without the lock. A second
        download wastes time, but is safe.

        Args:
            key: key of the artifact.
            timeout_seconds: limit of the wait for a process that signals no progress.
            most_seconds: limit of the wait for a process that signals progress.
            when_busy: called repeatedly while that process signals that the server is busy, with
                the maximum seconds of its wait. Returns whether to wait for it. This time does not
                count towards the limits.

        Returns:
            Function that signals progress to waiting processes, or with `busy_seconds` that this
            process waits for a busy server, at most for these seconds.
        """
        name = f"locks/{key.fingerprint[:3]}"
        waited, since = 0.0, monotonic()

        def may_wait() -> bool:
            nonlocal waited, since
            signal = _recent(self._place / f"{name}.on", max(timeout_seconds, _RECENT_SECONDS))
            if signal is not None and (size := signal.st_size):
                is_allowed = when_busy(inf if size == _ENDLESS else size)
                since = monotonic()
                return is_allowed
            waited += monotonic() - since
            since = monotonic()
            return waited < timeout_seconds or (waited < most_seconds and signal is not None)

        is_held = False
        with _LockFile(f"{name}.lock", self._root, fcntl.flock, fcntl.LOCK_UN) as descriptor:
            with contextlib.suppress(OSError):  # a file system without locks
                is_held = descriptor is not None and _lock(descriptor, may_wait)
            signal = _Signal(f"{name}.on", self._root)
            try:
                yield signal if is_held else _ignore
            finally:
                if signal.size:
                    signal()

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Enclose a download that a job needs now, so that prefetching on this host pauses."""
        with self._downloading_lock() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    _ofd_lock(descriptor, fcntl.F_RDLCK)
            yield

    def is_downloading(self) -> bool:
        """Return whether a process of this host is inside `downloading`.

        Ask for the lock without taking it: a download that begins meanwhile could not take it.
        """
        with self._downloading_lock() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    answer = _ofd_lock(descriptor, fcntl.F_WRLCK, command=fcntl.F_OFD_GETLK)
                    return answer != fcntl.F_UNLCK
        return False

    def _downloading_lock(self) -> "_LockFile":
        return _LockFile("locks/downloading", self._root, _ofd_lock, fcntl.F_UNLCK)

    def size_bytes(self) -> int:
        """Return the bytes of all envelopes. Reads the size of each."""
        return sum(size for _, size, _ in self._envelopes())

    def evict(self) -> int:
        """If the tier is over its limit, remove least recently used envelopes to 90 % of it.

        Do nothing while another process of this host evicts: together, they would remove twice as
        much.

        Returns:
            Removed bytes.
        """
        from filelock import FileLock, Timeout

        self._added_bytes = 0
        try:
            with FileLock(self._place / "locks" / "evict", timeout=0):
                return self._evict()
        except (Timeout, OSError, NotImplementedError):
            return 0

    def _evict(self) -> int:
        self._remove_stale()
        latest = time() + _MAX_AHEAD_SECONDS
        found = sorted(self._envelopes(), key=lambda entry: entry[2])
        for path, _, used_at in reversed(found):
            if used_at <= latest:
                break
            with contextlib.suppress(OSError):  # used while the clock was ahead; set it to now
                os.utime(path)
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
        """Evict if this process added an envelope, and remove a private tier."""
        if self.is_private:
            self._remove_private()
        elif self._added_bytes:
            self.evict()

    def _failure(self, path: Path, error: OSError) -> LocalTierError:
        return LocalTierError(f"{path}: {error}".replace(str(self._place), str(self.root)))

    def _remove_private(self) -> None:
        if self._owner == os.getpid():  # a forked child leaves the tier to its parent
            shutil.rmtree(self.root, ignore_errors=True)

    def _envelopes(self) -> Iterator[tuple[Path, int, float]]:
        for path in self._paths("??/*"):
            with contextlib.suppress(OSError):  # another process evicts at the same time
                status = path.stat()
                yield path, status.st_size, status.st_mtime

    def _remove_stale(self) -> None:
        oldest = time() - STALE_SECONDS
        for path in (self._place / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest and path.is_file():
                    _remove_unless_held(path)


def _ofd_lock(descriptor: int, kind: int, *, command: int = fcntl.F_OFD_SETLK) -> int:
    """Lock or unlock an open file description, and return the type in the answer."""
    answer = fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    return int(_FLOCK.unpack(answer)[0])


def _remove_unless_held(path: Path) -> None:
    """Remove a temporary file unless a process still writes it (`SpillFile`).

    Raises:
        OSError: it cannot be removed.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # a file system without locks
            pass
        path.unlink()


class _LockFile:
    """Opens a file to lock: a descriptor, or None if it cannot be opened. Unlock it at the end."""

    def __init__(
        self, path: str, root: int, change: Callable[[int, int], object], unlocked: int
    ) -> None:
        self._path = path
        self._root = root
        self._change = change
        self._unlocked = unlocked
        self._descriptor: int | None = None

    def __enter__(self) -> int | None:
        try:
            self._descriptor = open_unshared(self._path, directory=self._root)
        except OSError:
            self._descriptor = None
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a child that C code forked has a copy
                self._change(self._descriptor, self._unlocked)
            close_unshared(self._descriptor)


def _lock(descriptor: int, may_wait: Callable[[], bool]) -> bool:
    """Lock a file, or return False if the wait must end. filelock takes six times the CPU time.

    Raises:
        OSError: the file system has no locks.
    """
    while True:
        with contextlib.suppress(BlockingIOError, PermissionError):  # POSIX allows both errors
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not may_wait():
            return False
        with forkable():
            sleep(_LOCK_POLL_SECONDS)


def _recent(path: Path, seconds: float) -> os.stat_result | None:
    """Return the status of a file that was touched within the last `seconds`, or None."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status if time() - status.st_mtime < seconds else None


class _Signal:
    """Touches a file, at most twice per second while the signal stays the same, and first after
    `_QUIET_SECONDS`. The size of the file is the number of seconds that the process waits for a
    busy server.
    """

    def __init__(self, path: str, root: int) -> None:
        self._path = path
        self._root = root
        self._touched = monotonic() + _QUIET_SECONDS - _TOUCH_SECONDS
        self.size = 0

    def __call__(self, *, busy_seconds: float = 0.0) -> None:
        before, self.size = self.size, ceil(min(busy_seconds, _ENDLESS))
        if self.size != before or monotonic() - self._touched > _TOUCH_SECONDS:
            self._touched = monotonic()
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(self._path, flags, 0o600, dir_fd=self._root)
                try:
                    os.ftruncate(descriptor, self.size)
                    os.utime(descriptor)
                finally:
                    os.close(descriptor)


def _ignore(**_: object) -> None:
    pass


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def _prepare(root: Path) -> Path:
    """Create the folders of a tier, to which other users have no access.

    Returns:
        Path to the root through a descriptor, which stays open.

    Raises:
        OSError: this user cannot write to a folder, or other users can.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if {each.name for each in root.iterdir()} <= {*FOLDERS, _EARLIER_FOLDER, "secret"}:
        descriptor = make_own_directory(root)
    else:  # keep the mode of a directory with other files, but others must not write to it
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
