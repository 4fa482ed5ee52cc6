"""This host: the local tier on its disk, and programs that its last run could not share."""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Final

from graphstash._artifacts.local_tier import FOLDERS, STALE_SECONDS
from graphstash._cli.doctor.findings import Finding, Topic, fail, ok, warn, within
from graphstash._cli.output import format_bytes, plural
from graphstash._process.run_record import read_last_run
from graphstash.config import ClientConfig
from graphstash.errors import Reason
from graphstash_schema.own_files import open_own_directory

__all__ = ["check_last_run", "check_local", "file_system_of"]

_MAX_CAUSES: Final = 4

_SCAN_SECONDS: Final = 5.0
"""Maximum seconds to scan the tier, which may be on a slow or hanging network file system."""

_NETWORK: Final = re.compile(
    r"nfs4?|cifs|smb3?|smbfs|lustre|gpfs|ceph|beegfs|afs|9p|glusterfs|wekafs"
    r"|fuse\.(sshfs|s3fs|gcsfuse|goofys|rclone|glusterfs|ceph\S*|juicefs|blobfuse2?|mount-s3)"
)
"""Types of network file systems."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


def check_local(config: ClientConfig) -> Topic[None]:
    """Check the local tier's directory: writable, on a local disk, with free space."""
    root = config.cache_dir
    try:
        yield from within(_SCAN_SECONDS * 2, partial(_inspect, root, int(config.local_limit)))
    except TimeoutError:
        yield fail(
            "local tier",
            f"{root} does not answer within {_SCAN_SECONDS * 2:g} s: probably a network file "
            "system that hangs",
            "set GRAPHSTASH_CACHE_DIR to a directory on a disk of this host",
        )


def _inspect(root: Path, limit_bytes: int) -> list[Finding]:
    if limit_bytes == 0:
        return [ok("local tier", "GRAPHSTASH_LOCAL_LIMIT=0: nothing is kept between jobs")]
    if refusal := _refusal(root):
        return [
            fail(
                "local tier",
                f"{refusal}: every process uses a temporary directory instead and downloads "
                "everything again",
                f"set GRAPHSTASH_CACHE_DIR to a directory of {_user(os.geteuid())} that no "
                "other user can write to",
            )
        ]
    return [*_contents(root, limit_bytes), *_place(root)]


def _refusal(root: Path) -> str:
    """Return why the tier cannot be used, or "". Leaves no file or folder behind."""
    for folder in (root, *(root / name for name in FOLDERS)):
        place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        try:
            if place == folder:
                os.close(open_own_directory(folder, open_to_others=0o777))
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            return (
                str(error) if not error.strerror else f"{place} cannot be written: {error.strerror}"
            )
    return ""


def _contents(root: Path, limit_bytes: int) -> Iterator[Finding]:
    held_bytes, stale_bytes, is_complete = _scan(root)
    place = next(path for path in (root, *root.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(place).free
    more = "" if is_complete else "at least "
    summary = (
        f"{root} holds {more}{format_bytes(held_bytes)} of {format_bytes(limit_bytes)}; "
        f"{format_bytes(free_bytes)} are free on its disk"
    )
    if free_bytes < limit_bytes - held_bytes:
        yield warn(
            "local tier",
            summary,
            "the disk will be full before the limit is reached: set GRAPHSTASH_LOCAL_LIMIT to "
            f"{format_bytes((held_bytes + free_bytes) * 0.9)} or less, or "
            "GRAPHSTASH_CACHE_DIR to a larger disk",
        )
    else:
        yield ok("local tier", summary)
    if stale_bytes:
        yield warn(
            "local tier",
            f"{plural(len(stale_bytes), 'temporary file')} of processes that died "
            f"({format_bytes(sum(stale_bytes))} in {root / 'tmp'})",
            "the next job that downloads or compiles something deletes them, or run: "
            f"find {root / 'tmp'} -type f -mmin +1440 -delete",
        )


def _scan(root: Path) -> tuple[int, list[int], bool]:
    """Return the bytes of all artifacts, the bytes of each stale file, and whether `_SCAN_SECONDS`
    sufficed.
    """
    held_bytes = 0
    stale_bytes: list[int] = []
    oldest = time() - STALE_SECONDS
    deadline = monotonic() + _SCAN_SECONDS
    for folder, _, names in os.walk(root):
        if monotonic() > deadline:
            return held_bytes, stale_bytes, False
        for name in names:
            try:
                status = os.lstat(Path(folder, name))
            except OSError:  # another process has evicted it
                continue
            if Path(folder).name == "tmp":
                if status.st_mtime < oldest:
                    stale_bytes.append(status.st_size)
            else:
                held_bytes += status.st_size
    return held_bytes, stale_bytes, True


def _place(root: Path) -> Iterator[Finding]:
    kind = file_system_of(root)
    if _NETWORK.fullmatch(kind):
        yield warn(
            "local tier",
            f"{root} is on a network file system ({kind}): slower than the server, and its locks "
            "may not work between hosts",
            "set GRAPHSTASH_CACHE_DIR to a directory on a disk of this host",
        )


def file_system_of(path: Path, *, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system of a path, which need not exist, or "" if it is unknown.

    `mounts` is the kernel's list of mounts, see proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    depth, kind = -1, ""
    target = Path(os.path.realpath(path))
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if len(parts := fields.split()) > 4 and rest:
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), parts[4]))
            # A later mount on the same mount point hides the earlier.
            if target.is_relative_to(point) and len(point.parts) >= depth:
                depth, kind = len(point.parts), rest.split()[0]
    return kind


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def check_last_run(config: ClientConfig) -> Topic[None]:
    """Report the most frequent causes for which the last run shared no program."""
    try:
        records = read_last_run(config.cache_dir)
    except OSError:  # the local tier's check reports it
        return
    causes = Counter(
        trouble.partition(": ")[2] or trouble
        for record in records or ()
        for _, trouble, _ in record.misses
        if trouble is not None and trouble.partition(":")[0] == Reason.UNSHAREABLE
    )
    for cause, count in causes.most_common(_MAX_CAUSES):
        yield warn(
            "last run",
            f"{plural(count, 'program')} {Reason.UNSHAREABLE}: {cause}",
            "every host compiles them: remove the cause, or accept it; "
            "`graphstash explain` names the programs",
        )
