"""The tables. A change here needs a revision in `migrations/`; `alembic check` compares the two.

A column that a later revision adds has a default in the database: servers of the release before go
on inserting rows without it while a fleet is upgraded.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.engine import Dialect

__all__ = [
    "UtcTime",
    "artifacts",
    "audit",
    "chores",
    "deletions",
    "leases",
    "manifest_entries",
    "metadata",
    "namespaces",
    "reports",
    "tokens",
    "usage",
]


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time; SQLite keeps no zone, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuses a naive time: its zone would be a guess."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        """Says that the time is UTC."""
        if value is None:
            return None
        utc: datetime = value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value
        return utc


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _key_columns() -> list[Column[Any]]:
    """An artifact's key. The fingerprint stands before kind and device type in the primary key: it
    alone nearly always tells artifacts apart, so a lookup searches by it.
    """
    return [
        Column("namespace", String(64), primary_key=True),
        Column("fingerprint", String(64), primary_key=True),
        Column("kind", String(32), primary_key=True),
        Column("device_type", String(128), primary_key=True),
    ]


artifacts = Table(
    "artifacts",
    metadata,
    *_key_columns(),
    Column("sha256", String(64), nullable=False, comment="names the blob"),
    Column("size_bytes", BigInteger, nullable=False),
    Column(
        "metadata_header", Text, nullable=False, comment="as uploaded; empty when there is none"
    ),
    Column("compile_seconds", Double, nullable=False, comment="what a hit saves"),
    Column(
        "toolchain",
        String(256),
        nullable=False,
        server_default="",
        comment="as the metadata says",
    ),
    Column("density", Double, nullable=False, server_default="0", comment="see value.py"),
    Column(
        "rank",
        Double,
        nullable=False,
        server_default="0",
        comment="least is evicted first, see value.py",
    ),
    Column("created_at", UtcTime, nullable=False),
    Column("last_used_at", UtcTime, nullable=False, comment="lags by the flush interval"),
    Column("hits", BigInteger, nullable=False, comment="lags by the flush interval"),
    Column("pinned_until", UtcTime, nullable=True, comment="is not evicted until then"),
    Column("withheld_at", UtcTime, nullable=True, comment="is not served since then, see reports"),
    Index(None, "sha256"),
    Index(None, "rank"),
    Index(None, "namespace", "rank"),
    Index(None, "last_used_at"),
)
"""One row is one artifact; its key never changes, and its digest and size only where a namespace's
policy lets a PUT replace what is there."""

deletions = Table(
    "deletions",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("claimed_until", UtcTime, nullable=True, comment="a server is at it until then"),
)
"""Blobs that lost an artifact and are deleted unless another one has them. A row is written in the
transaction that removes the artifact and goes when the blob is gone: a server that dies in between
leaves the row for any other one."""

chores = Table(
    "chores",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("next_at", UtcTime, nullable=False),
)
"""Periodic work that one server does for all: whoever moves `next_at` does it."""

leases = Table(
    "leases",
    metadata,
    *_key_columns(),
    Column("token", String(32), nullable=False, comment="of the last grant"),
    Column("fencing", BigInteger, nullable=False, comment="grows with every grant"),
    Column("holder", String(128), nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("released_at", UtcTime, nullable=True, comment="null while it is held"),
    Index(None, "expires_at"),
)
"""The last grant of each key. A released row stays for a while so that `fencing` goes on growing
(see `queries.leases`)."""

manifest_entries = Table(
    "manifest_entries",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("fingerprint", String(64), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("device_type", String(128), primary_key=True),
    Column("used_at", UtcTime, nullable=False),
    Column("runs", Integer, nullable=False),
    Index(None, "namespace", "name", "used_at"),
)
"""A manifest is its entries: one without entries does not exist."""

usage = Table(
    "usage",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("artifacts", BigInteger, nullable=False, comment="stored now"),
    Column("size_bytes", BigInteger, nullable=False, comment="stored now"),
    Column("hits", BigInteger, nullable=False),
    Column("misses", BigInteger, nullable=False),
    Column("served_bytes", BigInteger, nullable=False),
    Column("puts", BigInteger, nullable=False),
    Column("conflicts", BigInteger, nullable=False),
    Column("saved_seconds", Double, nullable=False),
    Column("evictions", BigInteger, nullable=False, server_default="0"),
    Column("evicted_bytes", BigInteger, nullable=False, server_default="0"),
)
"""`artifacts` and `size_bytes` change in the transaction of the row they count; the rest lags by
the flush interval. An artifact counts in full although equal blobs are kept once."""

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True, comment="in the token, not a secret"),
    Column("secret_sha256", String(64), nullable=False),
    Column("description", String(200), nullable=False),
    Column("grants", Text, nullable=False, comment="<scope>:<pattern>, a space between two"),
    Column("created_at", UtcTime, nullable=False),
    Column("created_by", String(128), nullable=False),
    Column("expires_at", UtcTime, nullable=True),
    Column("last_used_at", UtcTime, nullable=True, comment="lags by the flush interval"),
    Column("revoked_at", UtcTime, nullable=True),
)
"""Secrets are 256 random bits, so a plain hash of them is as good as a slow one."""

namespaces = Table(
    "namespaces",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("mode", String(16), nullable=False),
    Column("trusted", Boolean, nullable=False),
    Column("anonymous_read", Boolean, nullable=False),
    Column("limit_bytes", BigInteger, nullable=True),
    Column("max_artifact_bytes", BigInteger, nullable=True),
    Column("requests_per_second", Double, nullable=True),
    Column("updated_at", UtcTime, nullable=False),
)
"""Policies; a namespace without a row has the defaults."""

reports = Table(
    "reports",
    metadata,
    *_key_columns(),
    Column("sha256", String(64), nullable=False, comment="the blob that was found wrong"),
    Column("reason", String(32), nullable=False),
    Column("reported_by", String(128), nullable=False),
    Column("reported_at", UtcTime, nullable=False),
)
"""Why an artifact is withheld: the report that did it. The row goes when an admin decides, or with
the artifact."""

audit = Table(
    "audit",
    metadata,
    Column(
        "id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    ),
    Column("at", UtcTime, nullable=False),
    Column("actor", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("namespace", String(64), nullable=True),
    Column("subject", String(300), nullable=False),
    Column("detail", Text, nullable=False),
    Column("request_id", String(64), nullable=True),
    Index(None, "at"),
    Index(None, "namespace", "id"),
)
"""Written in the transaction of the change it tells of; rows go after a while, see settings."""
