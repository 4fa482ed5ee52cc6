"""Backup: copy a database and its blobs to a directory, and back.

    <backup>/backup.json                  the manifest of the complete backup; replaced last
    <backup>/database-<16 hex>.sqlite3    all rows at one moment (`snapshot`)
    <backup>/blobs/sha256/ab/<hex>        the blobs that these rows name
    <backup>/backup.lock                  held by the process that writes or reads the backup

A backup copies the rows first and their blobs second, while servers run. If blobs are missing by
then, it copies the rows again. After three attempts, it leaves out the artifacts of missing blobs.
It does not copy blobs that the directory has. If a backup is killed, the previous one stays
complete, and the next one continues.

A restore stores every blob, and then replaces all rows in one step. Until it has ended, a file in
the data directory keeps servers from starting. The same command continues a killed restore.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from sqlalchemy.engine import URL, make_url

from graphstash_schema import Digest
from graphstash_server import __version__
from graphstash_server.clock import Clock, system_clock
from graphstash_server.db.migrate import is_of_later_release
from graphstash_server.db.queries.identifiers import find_cache_id
from graphstash_server.errors import (
    BackupError,
    DigestMismatchError,
    ShortBlobError,
)
from graphstash_server.file_locks import ServerLock, hold_database
from graphstash_server.logs import in_background
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.maintenance.snapshot import (
    apply_withdrawals,
    drop_artifacts_of,
    find_generations_in,
    has_rows,
    is_in_use,
    list_digests_in,
    load_snapshot,
    remove_snapshot,
    revision_in,
    take_snapshot,
    upgrade_snapshot,
)
from graphstash_server.storage import BlobReader, BlobStore, DiskBlobStore
from graphstash_server.storage.upload import sync_directory

__all__ = ["UNFINISHED", "Backup", "Copied", "Manifest", "Progress", "abandon", "restore"]

UNFINISHED: Final = "restore.json"
"""File in a data directory during a restore. Servers and commands refuse to start beside it."""

_FORMAT: Final = 1
_EARLY_FILES: Final = {"backup.lock", "backup.json.partial"}
"""Files that a backup may leave if it is killed before it has written backup.json."""
_MAX_ATTEMPTS: Final = 3
_CONCURRENCY: Final = 8

Progress = Callable[[int, int], None]
"""Called after each blob with its size and the total size of all blobs to copy, in bytes."""


class Manifest(BaseModel):
    """backup.json of a complete backup. A backup of an earlier release may have no `cache`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = _FORMAT
    release: str = __version__
    revision: str
    taken_at: AwareDatetime
    cache: str | None = None
    source: str | None = None
    database: str
    database_sha256: str
    blobs: int
    blob_bytes: int


class _Begun(BaseModel):
    """backup.json until the first backup is complete."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = _FORMAT
    database_sha256: str | None = None


class _Restore(_Begun):
    """restore.json in a data directory. `is_loading` is true once rows may have been replaced."""

    is_loading: bool = True


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The outcome of a backup or a restore.

    Attributes:
        manifest: the backup. After a restore, it counts the blobs that were restored.
        copied: number of blobs that were copied. The target already had the others.
        left_out: number of artifacts that were left out because their blobs are lost or damaged.
        is_current: whether the restore applied the replaced database's withholds and revocations.
    """

    manifest: Manifest
    copied: int
    left_out: int
    is_current: bool = False


class Backup:
    """A directory with a backup. One process can write it, or several can read it, at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path / "backup.json"

    async def take(
        self,
        *,
        url: str,
        collector: BlobCollector,
        clock: Clock,
        is_deep: bool,
        is_moved: bool,
        progress: Progress,
    ) -> Copied:
        """Copy the database at `url` and the blobs of its artifacts. With `is_deep`, also verify
        the blobs that the directory has, and replace damaged ones. With `is_moved`, the previous
        backup may name another location of the database.

        Raises:
            BackupError: the directory cannot be used, or it has the backup of another cache.
            ServerError: the blob store does not answer. The next backup continues.
            StartError: the database does not answer.
        """
        async with self._opened() as target:
            before, source = self._manifest(), _source_of(url)
            async with collector.database.writing() as connection:
                cache = await find_cache_id(connection)
            self._check_identity(before, cache, source, is_moved=is_moved)
            new = self._path / "database.new"
            here = {each async for each in target.list()}
            copied: set[Digest] = set()
            for _ in range(_MAX_ATTEMPTS):
                taken_at = clock()
                await asyncio.to_thread(take_snapshot, url, new)
                needed = await asyncio.to_thread(list_digests_in, new)
                self._check_same_cache(before, needed, here)
                missing = await _missing(needed, here, checked_in=target if is_deep else None)
                await asyncio.to_thread(self._check_space, missing)
                lost = await _copy(missing, partial(_open, collector), target, progress)
                copied |= set(missing) - set(lost)
                here = (here | set(missing)) - set(lost)
                is_deep = False
                if not lost:
                    break
            left_out = await asyncio.to_thread(drop_artifacts_of, new, lost) if lost else 0
            manifest = await asyncio.to_thread(
                partial(self._complete, new, taken_at, cache=cache, source=source)
            )
            kept = {each.sha256 for each in needed}  # `list` gave a truncated blob another size
            for unused in here:
                if unused.sha256 not in kept:
                    await target.delete(unused)
        kept_copies = len(copied.intersection(needed))  # a copied blob may be unneeded by now
        return Copied(manifest=manifest, copied=kept_copies, left_out=left_out)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[DiskBlobStore]:
        with self._locked():
            store = await asyncio.to_thread(DiskBlobStore, self._path / "blobs")
            try:
                yield store
            finally:
                await store.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise BackupError(f"{self._path} is a file: choose a directory") from None
        names = {each.name for each in self._path.iterdir()}
        if names - _EARLY_FILES and self._file.name not in names:
            raise BackupError(
                f"{self._path} is not empty and is not a backup: choose another directory"
            )
        with _lock(self._path / "backup.lock"):
            if not self._file.is_file():
                _replace(self._file, _Begun().model_dump_json())
            yield

    def _complete_manifest(self) -> Manifest:
        found = self._manifest()
        if found is None:
            raise BackupError(f"{self._path} has no complete backup: `graphstash backup` takes one")
        if is_of_later_release(found.revision):
            raise BackupError(
                f"{self._path} was taken by release {found.release} at database revision "
                f"{found.revision}, which release {__version__} does not know: upgrade first"
            )
        return found

    def _manifest(self) -> Manifest | None:
        try:
            read = self._file.read_bytes()
        except FileNotFoundError:
            problem = f"{self._path} is not a backup: it has no {self._file.name}"
            raise BackupError(problem) from None
        try:
            begun = _Begun.model_validate_json(read)
            if begun.format != _FORMAT:
                raise BackupError(
                    f"{self._path} has the format {begun.format} and this release reads format "
                    f"{_FORMAT}: use the release that took the backup"
                )
            return None if begun.database_sha256 is None else Manifest.model_validate_json(read)
        except ValidationError as error:
            raise BackupError(
                f"{self._file} is damaged: {error.error_count()} fields are wrong"
            ) from None

    def _check_identity(
        self, before: Manifest | None, cache: str, source: str, *, is_moved: bool
    ) -> None:
        """Refuse to replace the backup of another cache or location. Otherwise a wrong setting
        could replace the only backup of a large cache by that of an empty one.
        """
        if before is None or before.cache is None:
            return
        if before.cache != cache:
            raise BackupError(
                f"{self._path} is the backup of another cache: of {before.cache} in "
                f"{before.source}, and this is {cache} in {source}. Choose another directory. If "
                "the cache was lost, restore the backup first"
            )
        if before.source != source and not is_moved:
            raise BackupError(
                f"{self._path} is the backup of {before.source}, and the settings name {source}: "
                "correct GRAPHSTASH_DATABASE_URL and GRAPHSTASH_DATA_DIR; if the cache has moved, "
                "use --moved"
            )

    def _check_same_cache(
        self, before: Manifest | None, needed: Sequence[Digest], here: set[Digest]
    ) -> None:
        """Refuse a new backup without a common blob: a setting is wrong, or the cache lost data."""
        if before is None or not before.blobs or not here.isdisjoint(needed):
            return
        raise BackupError(
            f"{self._path} is the backup of another cache, or this cache has lost all that was "
            f"backed up on {before.taken_at:%Y-%m-%d %H:%M} UTC: choose another directory"
        )

    def _check_space(self, missing: Sequence[Digest]) -> None:
        needed_bytes = sum(each.size_bytes for each in missing)
        free = shutil.disk_usage(self._path).free
        if needed_bytes > free:
            raise BackupError(
                f"{self._path} has {free} bytes free and {needed_bytes} bytes of blobs are to be "
                "copied: nothing was replaced; free some space, or choose another directory"
            )

    def _complete(self, new: Path, taken_at: datetime, *, cache: str, source: str) -> Manifest:
        """Put the new rows and their manifest in place, and remove the old rows."""
        needed = list_digests_in(new)
        sha256 = _sha256_of(new)
        manifest = Manifest(
            revision=revision_in(new),
            taken_at=taken_at,
            cache=cache,
            source=source,
            database=f"database-{sha256[:16]}.sqlite3",
            database_sha256=sha256,
            blobs=len(needed),
            blob_bytes=sum(each.size_bytes for each in needed),
        )
        new.replace(self._path / manifest.database)
        sync_directory(self._path)
        _replace(self._file, manifest.model_dump_json(indent=2) + "\n")
        for old in self._path.glob("database-*.sqlite3"):
            if old.name != manifest.database:
                old.unlink()
        return manifest

    def check(self) -> None:
        """Check that a restore can read the backup, before it makes anything elsewhere.

        Raises:
            BackupError: the directory has no backup, or one that is incomplete or of a later
                release.
        """
        with _lock(self._path / "backup.lock", is_reader=True):
            self._complete_manifest()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[tuple[Manifest, "_Source"]]:
        """Open a complete backup. Writes nothing, because the directory may be read-only.

        Raises:
            BackupError: the backup is incomplete, or of a later release.
        """
        with _lock(self._path / "backup.lock", is_reader=True):
            manifest = self._complete_manifest()
            directory = self._path / "blobs"
            blobs = DiskBlobStore(directory, is_read_only=True)
            try:
                digests = {each async for each in blobs.list()} if directory.is_dir() else set()
                yield manifest, _Source(blobs, digests, self._path / manifest.database, manifest)
            finally:
                await blobs.close()


@dataclass(frozen=True)
class _Source:
    """The parts of a backup that is being restored."""

    blobs: DiskBlobStore
    digests: set[Digest]
    database: Path
    manifest: Manifest

    def stage(self, staged: Path) -> None:
        """Copy the rows to a new file, and upgrade them to this release's revision. Blocks."""
        staged.parent.mkdir(parents=True, exist_ok=True)
        remove_snapshot(staged)
        try:
            shutil.copyfile(self.database, staged)
        except FileNotFoundError:
            raise BackupError(f"the backup is damaged: {self.database} is gone") from None
        if _sha256_of(staged) != self.manifest.database_sha256:
            raise BackupError(
                f"the backup is damaged: {self.database} has other bytes than its manifest says"
            )
        upgrade_snapshot(staged)


async def restore(
    backup: Path,
    *,
    url: str,
    data_dir: Path,
    store: BlobStore,
    is_replacing: bool,
    is_partial: bool,
    progress: Progress,
) -> Copied:
    """Store the blobs of a backup, and replace all rows of the database at `url` by the backup's.

    The caller must have stopped all servers. With `is_replacing`, the target may have artifacts.
    Its undamaged blobs are kept. Artifacts that its database withholds stay withheld, and tokens
    that it has revoked stay revoked. With `is_partial`, artifacts without a blob are left out.

    Raises:
        BackupError: the backup cannot be used or lacks blobs, the target is not empty, or a server
            uses the target. No row was replaced.
        ServerError: the blob store does not answer. The same command continues.
        StartError: the database does not answer.
    """
    async with _exclusive(data_dir, url) as (unfinished, staged):
        async with Backup(backup).read() as (manifest, source):
            begun = await asyncio.to_thread(_read_begun, unfinished)
            if not is_replacing:
                await _check_empty(begun, manifest, url, store)
            await asyncio.to_thread(source.stage, staged)
            is_current = await asyncio.to_thread(has_rows, url) and await asyncio.to_thread(
                apply_withdrawals, staged, url, now=system_clock()
            )
            for digest, generation in await asyncio.to_thread(find_generations_in, staged):
                store.use_generation(digest, generation)
            needed = await asyncio.to_thread(list_digests_in, staged)
            here = {each async for each in store.list()}
            missing = await _missing(needed, here, checked_in=store)
            lost = [each for each in missing if each not in source.digests]
            _check_losses(backup, lost, needed, is_partial=is_partial)
            found = [each for each in missing if each in source.digests]
            full = await store.full(sum(each.size_bytes for each in found))
            if full is not None:
                raise full
            was_loading = begun is not None and begun.is_loading
            begun = _Restore(database_sha256=manifest.database_sha256, is_loading=was_loading)
            await asyncio.to_thread(_replace, unfinished, begun.model_dump_json())
            lost += await _copy(found, source.blobs.open, store, progress)
            _check_losses(backup, lost, needed, is_partial=is_partial)
            left_out = await asyncio.to_thread(drop_artifacts_of, staged, lost) if lost else 0
            counts = {
                "blobs": len(needed) - len(lost),
                "blob_bytes": sum(each.size_bytes for each in {*needed} - {*lost}),
            }
            begun = begun.model_copy(update={"is_loading": True})
            await asyncio.to_thread(_replace, unfinished, begun.model_dump_json())
            await asyncio.to_thread(load_snapshot, staged, url)
            unfinished.unlink()
            sync_directory(data_dir)
        return Copied(
            manifest=manifest.model_copy(update=counts),
            copied=len(missing) - len(lost),
            left_out=left_out,
            is_current=is_current,
        )


async def abandon(*, url: str, data_dir: Path) -> None:
    """Give up a restore that was interrupted before it replaced a row, so that servers can start.

    Raises:
        BackupError: no restore was interrupted, it may have replaced rows, or a server is running.
        StartError: the database does not answer.
    """
    async with _exclusive(data_dir, url) as (unfinished, _):
        begun = await asyncio.to_thread(_read_begun, unfinished)
        if begun is None:
            raise BackupError(f"no restore in {data_dir} was interrupted: there is nothing to do")
        if begun.is_loading:
            raise BackupError(
                f"the restore in {data_dir} may have replaced rows: run the same restore again"
            )
        unfinished.unlink()
        sync_directory(data_dir)


@asynccontextmanager
async def _exclusive(data_dir: Path, url: str) -> AsyncIterator[tuple[Path, Path]]:
    """Exclude servers and commands. Yield the paths of restore.json and of the restored rows."""
    parsed = make_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    staged = (Path(parsed.database or "").parent if is_sqlite else data_dir) / "restore.sqlite3"
    lock = ServerLock(data_dir / "server.lock")  # held by servers of earlier releases
    try:
        with hold_database(data_dir, is_exclusive=True) as is_free:
            if not (is_free and lock.was_alone) or await asyncio.to_thread(is_in_use, url):
                raise BackupError(
                    f"a server uses {data_dir} or its database, or a command does: stop all "
                    "servers first"
                )
            try:
                yield data_dir / UNFINISHED, staged
            finally:
                remove_snapshot(staged)
    finally:
        lock.close()


def _read_begun(unfinished: Path) -> _Restore | None:
    """Return the record of an interrupted restore. If unreadable, assume that it replaced rows."""
    try:
        return _Restore.model_validate_json(unfinished.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return _Restore()


async def _check_empty(
    begun: _Restore | None, manifest: Manifest, url: str, store: BlobStore
) -> None:
    """Refuse a target that is not empty, except to continue a restore of the same backup."""
    if begun is not None:
        if begun.database_sha256 == manifest.database_sha256:
            return
        raise BackupError(
            "a restore of another backup was begun here: continue that one, or use --replace"
        )
    is_empty = not await asyncio.to_thread(has_rows, url)
    async for _ in store.list():
        is_empty = False
        break
    if not is_empty:
        raise BackupError(
            "the database or the blob store is not empty: restore into an empty one, or use "
            "--replace to lose what is there"
        )


def _check_losses(
    backup: Path, lost: Sequence[Digest], needed: Sequence[Digest], *, is_partial: bool
) -> None:
    if lost and not is_partial:
        raise BackupError(
            f"{len(lost)} of {len(needed)} blobs are missing or damaged in {backup}, and no row "
            "was replaced: `graphstash backup --deep` repairs the backup of a cache that still has "
            "them, --partial restores the other artifacts, and `graphstash restore --abandon` "
            "keeps what was there"
        )


def _source_of(url: str) -> str:
    """Return the location of a database, which is equal for all its servers. Omits the password."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return str(Path(parsed.database or "").resolve())
    place = {name: parsed.query[name] for name in ("host", "port") if name in parsed.query}
    shown = URL.create(
        parsed.get_backend_name(),
        host=parsed.host,
        port=parsed.port,
        database=parsed.database,
        query=place,
    )
    return shown.render_as_string()


async def _open(collector: BlobCollector, digest: Digest) -> BlobReader | None:
    """Open a blob. Its name in S3 contains its generation, which any server may increment. So if
    the store has no such blob, read the generation from the database, and retry if it is new.
    """
    reader = await collector.blobs.open(digest)
    if reader is None and await collector.learn_generations([digest]):
        return await collector.blobs.open(digest)
    return reader


async def _missing(
    needed: Sequence[Digest], here: set[Digest], *, checked_in: BlobStore | None
) -> list[Digest]:
    """Return the blobs that a store lacks. With `checked_in`, that includes its damaged blobs."""
    missing = []
    for digest in needed:
        is_here = digest in here
        if is_here and checked_in is not None:
            is_here = bool(await checked_in.is_whole(digest))
        if not is_here:
            missing.append(digest)
    return missing


async def _copy(
    missing: Sequence[Digest],
    opened: Callable[[Digest], Awaitable[BlobReader | None]],
    target: BlobStore,
    progress: Progress,
) -> list[Digest]:
    """Copy blobs, several at a time, and check their bytes. Return the lost and damaged blobs.

    Raises:
        BackupError: the store stopped in the middle of a blob. The next attempt continues.
        ServerError: a store does not answer, or is full.
    """
    left = iter(missing)
    total_bytes = sum(each.size_bytes for each in missing)
    lost: list[Digest] = []

    async def work() -> None:
        for digest in left:
            if not await _copy_one(digest, opened, target):
                lost.append(digest)
            progress(digest.size_bytes, total_bytes)

    workers = [in_background(work()) for _ in range(_CONCURRENCY)]
    try:
        await asyncio.gather(*workers)
    except ShortBlobError as error:
        raise BackupError(f"{error}: the same command continues") from error
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
    return lost


async def _copy_one(
    digest: Digest,
    opened: Callable[[Digest], Awaitable[BlobReader | None]],
    target: BlobStore,
) -> bool:
    reader = await opened(digest)
    if reader is None:
        return False
    try:
        if reader.size_bytes != digest.size_bytes:
            return False
        await target.put(digest, reader.chunks(0, digest.size_bytes))
    except DigestMismatchError:
        return False
    finally:
        await reader.close()
    return True


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file durably and atomically."""
    partial_file = path.with_name(path.name + ".partial")
    with partial_file.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial_file.replace(path)
    sync_directory(path.parent)


@contextmanager
def _lock(path: Path, *, is_reader: bool = False) -> Iterator[None]:
    """Lock a backup. Readers share the lock, and need none if a copied backup lacks the file."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb" if is_reader else "ab"))
            fcntl.flock(file, (fcntl.LOCK_SH if is_reader else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"another process uses the backup {path.parent}") from None
        except FileNotFoundError:
            if not is_reader:
                raise
        yield
