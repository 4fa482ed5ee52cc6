"""Records of runs: what a run missed, kept on this host so that it can be explained later.

A run is all processes that one `graphstash run` started, or one process that installed the cache by
itself. Each process leaves a file of its own in the directory of its run, in the local tier. Only
this user can use these directories, or they are not used.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from graphstash._artifacts import run_folder
from graphstash._compile.misses import Miss
from graphstash._compile.stats import Stats
from graphstash._process.run_name import is_run
from graphstash.config import ClientConfig
from graphstash_schema.explanation import Description
from graphstash_schema.own_files import make_own_directory, open_own_directory

__all__ = ["ProcessRecord", "read_last_run", "save"]

_FOLDER: Final = "records"
_KEPT: Final = 20
_MAX_BYTES: Final = 32 * 1024**2


@dataclass(frozen=True)
class ProcessRecord:
    """What one process of a run left.

    Attributes:
        argv: its command line.
        url: of its server.
        namespace: that it wrote to.
        started_at: seconds since 1970.
        stats: what the cache counted, as `Stats` names it.
        misses: what it compiled: description, reason or None, seconds.
    """

    argv: Sequence[str]
    url: str
    namespace: str
    started_at: float
    stats: Mapping[str, Any]
    misses: Sequence[tuple[Description, str | None, float]]


def save(
    config: ClientConfig, stats: Stats, misses: Sequence[Miss], *, run: str, started_at: float
) -> None:
    """Leaves the record of this process of a run; the oldest runs beyond twenty are removed,
    except those of which a process still lives.

    Raises:
        OSError: it cannot be written.
    """
    record = {
        "argv": sys.argv,
        "url": config.url,
        "namespace": config.namespace,
        "started_at": started_at,
        "stats": asdict(stats),
        "misses": [
            (
                each.description.model_dump(mode="json"),
                None if each.reason is None else each.reason.value,
                each.compile_seconds,
            )
            for each in misses
        ],
    }
    config.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(make_own_directory(config.cache_dir / _FOLDER)) as runs:
        (runs / run).mkdir(mode=0o700, exist_ok=True)
        partial = runs / run / f".{os.getpid()}"
        with open(partial, "w", encoding="utf-8", opener=_private) as file:
            json.dump(record, file)
        partial.replace(runs / run / f"{os.getpid()}.json")
        for old in _names(runs)[:-_KEPT]:
            if old != run:
                run_folder.remove_unless_held(runs / old)


def read_last_run(cache_dir: Path) -> list[ProcessRecord] | None:
    """What the processes of the run left that began last; None when there is none.

    Raises:
        OSError: others than this user may write there.
    """
    try:
        descriptor = open_own_directory(cache_dir / _FOLDER)
    except FileNotFoundError:
        return None
    with _opened(descriptor) as runs:
        for name in reversed(_names(runs)):
            if any((runs / name).glob("*.json")):
                return list(_read(runs / name))
    return None


@contextmanager
def _opened(descriptor: int) -> Iterator[Path]:
    """The directory that a descriptor stands for, wherever it is moved; closed at the end."""
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _names(runs: Path) -> list[str]:
    """The runs, the oldest first; whatever else lies there is not ours."""
    return sorted(each.name for each in runs.iterdir() if is_run(each.name))


def _read(run: Path) -> Iterator[ProcessRecord]:
    """What the processes of a run left; a damaged record is left out."""
    for path in sorted(run.glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if path.stat().st_size > _MAX_BYTES:
                continue
            read = json.loads(path.read_text("utf-8"))
            misses = [
                (Description.model_validate(described), reason, float(seconds))
                for described, reason, seconds in read["misses"]
            ]
            yield ProcessRecord(
                [str(word) for word in read["argv"]],
                str(read["url"]),
                str(read["namespace"]),
                float(read["started_at"]),
                dict(read["stats"]),
                misses,
            )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
