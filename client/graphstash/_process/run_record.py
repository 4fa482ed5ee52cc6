"""Records of runs: what a run missed, kept on this host so that it can be explained later.

A run is all processes that one `graphstash run` started, or one process that installed the cache by
itself. Each process leaves a file of its own in the directory of its run, beside the local tier.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from graphstash._compile.misses import Miss
from graphstash._compile.stats import Stats
from graphstash._process.run_name import RUN_VARIABLE, new_run
from graphstash.config import ClientConfig
from graphstash_schema.explanation import Description

__all__ = ["ProcessRecord", "last_run", "read_run", "save"]

_FOLDER: Final = "runs"
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


def save(config: ClientConfig, stats: Stats, misses: Sequence[Miss], *, started_at: float) -> None:
    """Leaves the record of this process; the oldest runs beyond twenty are removed.

    Raises:
        OSError: it cannot be written.
    """
    runs = config.cache_dir / _FOLDER
    run = runs / Path(os.environ.get(RUN_VARIABLE) or new_run()).name
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    partial = run / f".{os.getpid()}"
    with open(partial, "w", encoding="utf-8", opener=_private) as file:
        json.dump(record, file)
    partial.replace(run / f"{os.getpid()}.json")
    for old in sorted(runs.iterdir())[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def last_run(cache_dir: Path) -> Path | None:
    """The directory of the run that began last; None when there is none."""
    with suppress(OSError):
        for run in sorted((cache_dir / _FOLDER).iterdir(), reverse=True):
            if any(run.glob("*.json")):
                return run
    return None


def read_run(run: Path) -> Iterator[ProcessRecord]:
    """What the processes of a run left; a damaged record is left out."""
    for path in sorted(run.glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
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
