"""Fill a database with thousands of artifacts, without the server."""

import asyncio
import hashlib
import json
import random
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.engine import URL, make_url

from graphstash_schema.explanation import digest_of_parts, identity_of
from graphstash_server.db import tables
from graphstash_server.eviction_order import aged, density

BLOB_BYTES = 4096
_BLOBS = 256
"""Number of different blobs. Artifacts share them, so a million artifacts take a megabyte of
disk."""

_NAMESPACE = "bench"
_NEWEST = datetime(2026, 6, 1, tzinfo=UTC)
_COLUMNS = [column.name for column in tables.artifacts.columns]


def blob(number: int) -> bytes:
    return f"{number % _BLOBS} ".encode().ljust(BLOB_BYTES, b".")


def fingerprint(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def fill(url: str, data_dir: Path, count: int) -> None:
    """Add artifacts to a migrated database, and their blobs to a disk store."""
    for number in range(min(count, _BLOBS)):
        sha256 = hashlib.sha256(blob(number)).hexdigest()
        path = data_dir / "blobs" / "sha256" / sha256[:2] / sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob(number))
    counters: dict[str, Any] = dict.fromkeys((column.name for column in tables.usage.columns), 0)
    counters |= {"namespace": _NAMESPACE, "artifacts": count, "size_bytes": count * BLOB_BYTES}
    _add(
        url, artifacts=(_COLUMNS, _rows(count)), usage=(list(counters), [tuple(counters.values())])
    )


def describe(url: str, count: int) -> None:
    """Describe the artifacts of a database.

    All artifacts but the first have one environment. Ten of every hundred have one label.
    """
    found = [environment_of(is_usual=is_usual) for is_usual in (True, False)]
    environments = [(digest_of_parts(parts), json.dumps(parts), _NEWEST) for parts in found]
    _add(
        url,
        environments=([column.name for column in tables.environments.columns], environments),
        descriptions=(_DESCRIPTION, _descriptions(count)),
    )


def _add(url: str, **added: tuple[Sequence[str], Iterable[tuple[Any, ...]]]) -> None:
    """Add rows to tables. Each table has columns and their values."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        asyncio.run(_copy(parsed, added))
        return
    with closing(sqlite3.connect(str(parsed.database))) as connection, connection:
        for table, (columns, rows) in added.items():
            marks = ", ".join("?" * len(columns))
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
            connection.executemany(statement, map(_without_timezone, rows))


def _without_timezone(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row with times as SQLite stores them."""
    return tuple(
        str(value.replace(tzinfo=None)) if isinstance(value, datetime) else value for value in row
    )


async def _copy(
    url: URL, added: Mapping[str, tuple[Sequence[str], Iterable[tuple[Any, ...]]]]
) -> None:
    connection = await asyncpg.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False)
    )
    for table, (columns, rows) in added.items():
        await connection.copy_records_to_table(table, records=rows, columns=list(columns))
        await connection.execute(f"VACUUM ANALYZE {table}")
    await connection.close()


_DESCRIPTION = (
    *("namespace", "fingerprint", "kind", "device_type"),
    *("label", "identity", "environment", "parts", "described_at"),
)


def _descriptions(count: int) -> Iterator[tuple[Any, ...]]:
    usual, other = (
        digest_of_parts(environment_of(is_usual=is_usual)) for is_usual in (True, False)
    )
    for number in range(count):
        program = program_of(number)
        yield (
            *(_NAMESPACE, fingerprint(number), "torch_xla", "cpu-bench"),
            "train.py:1" if number % 10 == 0 else f"train.py:{number}",
            identity_of(program),
            other if number == 0 else usual,
            json.dumps(program),
            _NEWEST,
        )


def program_of(number: int) -> dict[str, str]:
    return {"program": fingerprint(number), "inputs": f"f32[{number}]"}


def environment_of(*, is_usual: bool) -> dict[str, str]:
    """Return twenty parts, one of them with many words, as on a real host."""
    flags = " ".join(f"feature{number}" for number in range(150))
    parts = {f"part{number}": f"value {number}" for number in range(18)}
    return {**parts, "cpu_features": flags, "env.XLA_FLAGS": f"--a={1 if is_usual else 2}"}


def _rows(count: int) -> Iterator[tuple[Any, ...]]:
    randomness = random.Random(1)
    hashes = [hashlib.sha256(blob(number)).hexdigest() for number in range(_BLOBS)]
    for number in range(count):
        used = _NEWEST - timedelta(seconds=randomness.uniform(0, 90 * 24 * 3600))
        seconds = randomness.lognormvariate(1, 2)
        worth = density(compile_seconds=seconds, size_bytes=BLOB_BYTES)
        row = {
            "namespace": _NAMESPACE,
            "fingerprint": fingerprint(number),
            "kind": "torch_xla",
            "device_type": "cpu-bench",
            "sha256": hashes[number % _BLOBS],
            "size_bytes": BLOB_BYTES,
            "metadata_header": "",
            "compile_seconds": seconds,
            "toolchain": f"torch 2.{number % 5}",
            "density": worth,
            "rank": worth + aged(used),
            "created_at": used,
            "last_used_at": used,
            "hits": 0,
            "pinned_until": None,
            "looked_up_until": None,
            "withheld_at": None,
        }
        yield tuple(row[name] for name in _COLUMNS)
