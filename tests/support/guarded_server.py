"""A server process that requires tokens, and a snapshot of everything that it stores."""

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sqlalchemy import Row, select

from graphstash_schema import ArtifactMetadata, Digest
from graphstash_server.db import tables
from graphstash_server.db.engine import Database
from graphstash_server.settings import load_settings
from graphstash_server.testing import ServerProcess
from support.tokens import Callers

DEVICE = "cpu-x86_64-0123456789abcdef"

_VOLATILE = {
    # Reads and refused requests change these columns, so legitimate requests change them.
    "artifacts": {"hits", "last_used_at", "rank", "looked_up_until"},
    "tokens": {"last_used_at"},
    "usage": {"hits", "misses", "served_bytes", "conflicts", "saved_seconds"},
}
_WATCHED = (
    *("artifacts", "audit", "deletions", "leases", "manifest_entries", "namespaces", "reports"),
    *("sessions", "tokens", "usage", "withdrawal_heads", "withdrawals"),
)


class Picture(NamedTuple):
    """A snapshot: the digest of every file, and every row of every relevant table."""

    files: dict[str, str]
    rows: dict[str, list[Row[Any]]]


def fingerprint(number: int = 0) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def artifact_path(namespace: str, number: int = 0) -> str:
    return f"/v1/{namespace}/artifacts/jax/{DEVICE}/{fingerprint(number)}"


def keys(numbers: Iterable[int]) -> list[dict[str, str]]:
    """Return keys of artifacts in the form of request bodies."""
    return [
        {"kind": "jax", "device_type": DEVICE, "fingerprint": fingerprint(number)}
        for number in numbers
    ]


class GuardedServer(Callers, ServerProcess):
    """A server process; a context manager.

    Attributes:
        directory: parent of its data, and of a file that the server must not read.
        canary: contents of that file.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        database_url: str = "",
        command: tuple[str, ...] = (sys.executable, "-m", "graphstash_server"),
        environment: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.directory = directory
        data_dir = directory / "data"
        url = {"database_url": database_url} if database_url else {}
        self.database_url = load_settings(data_dir=data_dir, **url).database_url
        self.canary = "a canary that must not sing"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "canary").write_text(self.canary)
        settings = {"auth": "tokens", "min_free_bytes": 0, "flush_seconds": 0.05} | settings | url
        variables = {f"GRAPHSTASH_{name.upper()}": str(settings[name]) for name in settings}
        Callers.__init__(self)
        ServerProcess.__init__(
            self, data_dir, *options, command=command, environment=(environment or {}) | variables
        )
        self.admin = self.token("admin:*", description="admin")

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        super().__exit__(None, None, None)

    def put(
        self,
        path: str,
        blob: bytes,
        *,
        token: str | None = None,
        metadata: ArtifactMetadata | str | None = None,
        **headers: str,
    ) -> httpx.Response:
        """Upload a blob as an attacker would, without a valid envelope."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers["Repr-Digest"] = Digest.of(blob).repr_digest
        if metadata is not None:
            text = metadata if isinstance(metadata, str) else metadata.to_header()
            headers["Graphstash-Metadata"] = text
        return self.http(token or self.admin).put(path, content=blob, headers=headers)

    def fill(self, namespace: str, *numbers: int) -> None:
        """Store artifacts that an attack must not change."""
        for number in numbers or (0,):
            metadata = ArtifactMetadata(compile_seconds=1.0, raw_size_bytes=1)
            path = artifact_path(namespace, number)
            answer = self.put(path, f"{namespace} {number}".encode(), metadata=metadata)
            assert answer.status_code == 201, answer.text

    def digest_of(self, namespace: str) -> str:
        """Return the digest of the namespace's only artifact, as reports name it."""
        (digest,) = (
            f"sha256:{row.sha256}"
            for row in self.picture().rows["artifacts"]
            if row.namespace == namespace
        )
        return digest

    def stats(self) -> Any:
        return self.http(self.admin).get("/v1/stats").json()

    def picture(self) -> Picture:
        files = {}
        for path in self.directory.rglob("*"):
            is_watched = path.suffix != ".log" and not path.name.startswith("graphstash.sqlite3")
            with suppress(FileNotFoundError):  # the server has just removed a temporary file
                if is_watched and path.is_file():
                    name = str(path.relative_to(self.directory))
                    files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return Picture(files, asyncio.run(_rows(self.database_url)))

    @contextmanager
    def withstands(self) -> Iterator[Counter[str]]:
        """Require that the block changes nothing, and count its refused requests by error code."""
        refused: Counter[str] = Counter()
        before, counted = self.picture(), Counter(self.stats()["refused"])
        yield refused
        refused.update(Counter(self.stats()["refused"]) - counted)
        assert self.picture() == before


async def _rows(url: str) -> dict[str, list[Row[Any]]]:
    database = Database(url)
    found = {}
    try:
        async with database.reading() as connection:
            for name in _WATCHED:
                table = getattr(tables, name)
                kept = [each for each in table.c if each.name not in _VOLATILE.get(name, ())]
                rows = await connection.execute(select(*kept).order_by(*table.primary_key))
                found[name] = list(rows)
    finally:
        await database.close()
    return found
