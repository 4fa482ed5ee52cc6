"""Fills a database with artifacts by the thousand, past the server."""

import asyncio
import hashlib
import json
import random
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.engine import URL, make_url

from graphstash_schema.explanation import digest_of_parts, identity_of
from graphstash_server.db.tables import artifacts, usage
from graphstash_server.eviction_order import aged, density

__all__ = [
    "BLOB_BYTES",
    "blob",
    "describe",
    "environment_of",
    "fill",
    "fingerprint",
    "program_of",
]

BLOB_BYTES = 4096
_BLOBS = 256
"""Different blobs; artifacts share them, so that a million take a megabyte of disk."""

_NEWEST = datetime(2026, 6, 1, tzinfo=UTC)
_COLUMNS = [column.name for column in artifacts.columns]


def blob(number: int) -> bytes:
    """The blob of an artifact."""
    return f"{number % _BLOBS} ".encode().ljust(BLOB_BYTES, b".")


def fingerprint(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def fill(url: str, data_dir: Path, count: int, *, namespace: str = "bench") -> None:
    """Adds artifacts to a migrated database, and their blobs to a disk store."""
    for number in range(min(count, _BLOBS)):
        sha256 = hashlib.sha256(blob(number)).hexdigest()
        path = data_dir / "blobs" / "sha256" / sha256[:2] / sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob(number))
    counters: dict[str, Any] = dict.fromkeys((column.name for column in usage.columns), 0)
    counters |= {"namespace": namespace, "artifacts": count, "size_bytes": count * BLOB_BYTES}
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        asyncio.run(_fill_postgres(parsed, count, namespace, counters))
    else:
        _fill_sqlite(parsed, count, namespace, counters)


def describe(url: str, count: int, *, namespace: str = "bench", changed: int = 0) -> None:
    """Describes the artifacts of a database, in one environment but for number `changed`; ten in a
    hundred have one label.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        asyncio.run(_describe_postgres(parsed, count, namespace, changed))
    else:
        _describe_sqlite(parsed, count, namespace, changed)


def _describe_sqlite(url: URL, count: int, namespace: str, changed: int) -> None:
    connection = sqlite3.connect(str(url.database))
    at = str(_NEWEST.replace(tzinfo=None))
    with connection:
        connection.executemany("INSERT INTO environments VALUES (?, ?, ?)", _environments(at))
        marks = ", ".join("?" * len(_DESCRIPTION))
        connection.executemany(
            f"INSERT INTO descriptions ({', '.join(_DESCRIPTION)}) VALUES ({marks})",
            _descriptions(count, namespace, changed, at),
        )
    connection.execute("ANALYZE")
    connection.close()


async def _describe_postgres(url: URL, count: int, namespace: str, changed: int) -> None:
    connection = await _connect(url)
    await connection.copy_records_to_table("environments", records=_environments(_NEWEST))
    await connection.copy_records_to_table(
        "descriptions",
        records=_descriptions(count, namespace, changed, _NEWEST),
        columns=_DESCRIPTION,
    )
    await connection.execute("VACUUM ANALYZE descriptions")
    await connection.close()


_DESCRIPTION = (
    *("namespace", "fingerprint", "kind", "device_type"),
    *("label", "identity", "environment", "parts", "described_at"),
)


def _descriptions(
    count: int, namespace: str, changed: int, at: object
) -> Iterator[tuple[Any, ...]]:
    usual, other = (digest_of_parts(environment_of(is_usual)) for is_usual in (True, False))
    for number in range(count):
        program = program_of(number)
        yield (
            *(namespace, fingerprint(number), "torch_xla", "cpu-bench"),
            "train.py:1" if number % 10 == 0 else f"train.py:{number}",
            identity_of(program),
            other if number == changed else usual,
            json.dumps(program),
            at,
        )


def _environments(at: object) -> list[tuple[str, str, object]]:
    found = [environment_of(is_usual) for is_usual in (True, False)]
    return [(digest_of_parts(parts), json.dumps(parts), at) for parts in found]


def program_of(number: int) -> dict[str, str]:
    return {"program": fingerprint(number), "inputs": f"f32[{number}]"}


def environment_of(is_usual: bool) -> dict[str, str]:  # noqa: FBT001
    """Twenty parts of which one has many words, as a host has them."""
    flags = " ".join(f"feature{number}" for number in range(150))
    parts = {f"part{number}": f"value {number}" for number in range(18)}
    return {**parts, "cpu_features": flags, "env.XLA_FLAGS": f"--a={1 if is_usual else 2}"}


def _rows(count: int, namespace: str, *, naive: bool) -> Iterator[tuple[Any, ...]]:
    randomness = random.Random(1)
    hashes = [hashlib.sha256(blob(number)).hexdigest() for number in range(_BLOBS)]
    for number in range(count):
        used = _NEWEST - timedelta(seconds=randomness.uniform(0, 90 * 24 * 3600))
        seconds = randomness.lognormvariate(1, 2)
        worth = density(compile_seconds=seconds, size_bytes=BLOB_BYTES)
        shown = used.replace(tzinfo=None) if naive else used
        row = {
            "namespace": namespace,
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
            "created_at": str(shown) if naive else shown,
            "last_used_at": str(shown) if naive else shown,
            "hits": 0,
            "pinned_until": None,
            "looked_up_until": None,
            "withheld_at": None,
        }
        yield tuple(row[name] for name in _COLUMNS)


def _fill_sqlite(url: URL, count: int, namespace: str, counters: dict[str, Any]) -> None:
    connection = sqlite3.connect(str(url.database))
    marks = ", ".join("?" * len(_COLUMNS))
    names = ", ".join(_COLUMNS)
    rows = _rows(count, namespace, naive=True)
    with connection:
        connection.executemany(f"INSERT INTO artifacts ({names}) VALUES ({marks})", rows)
        connection.execute(
            f"INSERT INTO usage ({', '.join(counters)}) VALUES ({', '.join('?' * len(counters))})",
            list(counters.values()),
        )
    connection.execute("ANALYZE")
    connection.close()


async def _fill_postgres(url: URL, count: int, namespace: str, counters: dict[str, Any]) -> None:
    connection = await _connect(url)
    rows = _rows(count, namespace, naive=False)
    await connection.copy_records_to_table("artifacts", records=rows, columns=_COLUMNS)
    await connection.copy_records_to_table(
        "usage", records=[tuple(counters.values())], columns=list(counters)
    )
    await connection.execute("VACUUM ANALYZE artifacts")
    await connection.close()


async def _connect(url: URL) -> asyncpg.Connection:
    return await asyncpg.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False)
    )
