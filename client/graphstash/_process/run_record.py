"""Records of a run's misses, kept on this host for `graphstash explain`.

A run is all processes that one `graphstash run` started, or one process that installed the cache.
Each process writes `records/<run>/<process id>.json` in the local tier. If other users have any
access to `records`, it is not read.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import sample
from typing import Final

from graphstash._artifacts import run_folder
from graphstash._compile.misses import Miss
from graphstash._compile.stats import Stats
from graphstash._process import run_name
from graphstash._process.run_name import is_run, new_run
from graphstash._replacing import replacing
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey
from graphstash_schema.explanation import Description
from graphstash_schema.own_files import make_own_directory, open_own_directory

__all__ = ["ProcessRecord", "read_earlier_runs", "read_last_run", "save"]

_FOLDER: Final = "records"
_KEPT: Final = 20
_MAX_TRIED: Final = 20
_MAX_AHEAD_SECONDS: Final = 3600.0
_MAX_BYTES: Final = 32 * 1024**2
_COUNTERS: Final = {each.name for each in fields(Stats)}


@dataclass(frozen=True)
class ProcessRecord:
    """Record of one process of a run.

    Attributes:
        namespace: namespace that the process wrote to.
        started_at: start of the process in seconds since 1970.
        run_started_at: start of the run in seconds since 1970.
        stats: its counters. Those that the release of the record did not count are 0.
        uncached: compilations after an error of the cache, or of programs that cannot be shared.
        misses: description, `Miss.trouble` and compile seconds of each miss.
        unsent: why uploads of compiled artifacts failed, by key.
        notes: why the process did not use the cache or share its results.
    """

    argv: Sequence[str]
    url: str
    namespace: str
    started_at: float
    run_started_at: float
    stats: Stats
    uncached: int
    misses: Sequence[tuple[Description, str | None, float]]
    unsent: Mapping[ArtifactKey, str]
    notes: Sequence[str]


def save(
    config: ClientConfig,
    stats: Stats,
    misses: Sequence[Miss],
    *,
    run: str,
    started_at: float,
    notes: Sequence[str] = (),
) -> None:
    """Write the record of this process. Then try to remove runs that are not among the twenty
    latest. A run stays while one of its processes lives, and for a week if its lock fails or is
    absent. Each call tries at most twenty random runs, because thousands may stay.

    Raises:
        OSError: the record cannot be written.
    """
    record = {
        "argv": sys.argv,
        "url": config.url,
        "namespace": config.namespace,
        "started_at": started_at,
        "stats": asdict(stats),
        "uncached": stats.uncached,
        "misses": [
            (
                each.description.model_dump(mode="json"),
                each.trouble,
                each.compile_seconds,
            )
            for each in misses
        ],
        "unsent": {str(each.description.key): each.unsent for each in misses if each.unsent},
        "notes": list(notes),
    }
    config.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(make_own_directory(config.cache_dir / _FOLDER)) as runs:
        (runs / run).mkdir(mode=0o700, exist_ok=True)
        with replacing(runs / run / f"{os.getpid()}.json", is_durable=False) as file:
            json.dump(record, file)
        removable = [name for name in _names(runs)[:-_KEPT] if name != run]
        for old in sample(removable, min(len(removable), _MAX_TRIED)):
            run_folder.remove_unless_held(runs / old)


def read_last_run(cache_dir: Path) -> list[ProcessRecord] | None:
    """Return the records of the latest run, or None if there is no record.

    Raises:
        OSError: other users have access to the directory.
    """
    try:
        descriptor = open_own_directory(cache_dir / _FOLDER)
    except FileNotFoundError:
        return None
    with _opened(descriptor) as runs:
        for name in reversed(_names(runs)):
            if any((runs / name).glob("*.json")):
                return _read(runs / name)
    return None


def read_earlier_runs(cache_dir: Path, *, before: float) -> list[ProcessRecord]:
    """Return the records of the runs that started before `before`, in seconds since 1970.

    Raises:
        OSError: other users have access to the directory, or it does not exist.
    """
    with _opened(open_own_directory(cache_dir / _FOLDER)) as runs:
        names = [name for name in _names(runs) if run_name.started_at(name) < before]
        return [record for name in names for record in _read(runs / name)]


@contextmanager
def _opened(descriptor: int) -> Iterator[Path]:
    """Yield a path to an open directory that stays valid if the directory is moved."""
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _names(runs: Path) -> list[str]:
    """Return the names of the runs, oldest first. A run from more than an hour in the future counts
    as oldest: the clock was wrong.
    """
    latest = new_run(after_seconds=_MAX_AHEAD_SECONDS)
    names = (each.name for each in runs.iterdir() if is_run(each.name))
    return sorted(names, key=lambda name: (name <= latest, name))


def _read(run: Path) -> list[ProcessRecord]:
    """Return a run's records by start of the process, but none that are damaged or above 32 MiB."""
    return sorted(_readable(run), key=lambda record: record.started_at)


def _readable(run: Path) -> Iterator[ProcessRecord]:
    for path in run.glob("*.json"):
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
                run_name.started_at(run.name),
                Stats(**{name: read["stats"][name] for name in _COUNTERS & read["stats"].keys()}),
                int(read.get("uncached", 0)),
                misses,
                {
                    ArtifactKey.parse(*key.split("/")): str(why)
                    for key, why in read.get("unsent", {}).items()
                },
                [str(note) for note in read.get("notes", ())],
            )
