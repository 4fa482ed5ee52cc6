"""The tables. A change needs a revision in `migrations/`. `alembic check` compares both.

A new column must be nullable or have a `server_default`: during a rolling upgrade, servers of the
previous release insert rows without it.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
    true,
)
from sqlalchemy.engine import Dialect

__all__ = [
    "UtcTime",
    "absences",
    "artifacts",
    "audit",
    "chores",
    "deletions",
    "descriptions",
    "environments",
    "generations",
    "history",
    "identifiers",
    "leases",
    "manifest_entries",
    "metadata",
    "namespaces",
    "recorded_times",
    "reports",
    "runs",
    "sessions",
    "suspensions",
    "tokens",
    "upstream_callers",
    "upstream_downloads",
    "upstream_namespaces",
    "upstream_publishes",
    "usage",
    "withdrawal_heads",
    "withdrawals",
]


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time. SQLite stores no time zone.

    SQLAlchemy's own conversions for SQLite give the same texts and times, in three times as many
    instructions.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        """Convert to UTC. Reject a naive time."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return value.astimezone(UTC)

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        """Return the conversion of a time for the driver."""
        if dialect.name != "sqlite":
            return super().bind_processor(dialect)

        def text_of(value: datetime | None) -> str | None:
            utc = self.process_bind_param(value, dialect)
            return None if utc is None else utc.isoformat(" ", "microseconds")[:_ZONE]

        return text_of

    def result_processor(self, dialect: Dialect, coltype: Any) -> Callable[[Any], Any] | None:
        """Return the conversion of the driver's value."""
        return _time_of if dialect.name == "sqlite" else super().result_processor(dialect, coltype)


_ZONE: Final = len("2026-11-28 12:00:00.000000")
"""Position of the time zone in an ISO time."""


def _time_of(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(f"{text}+00:00")


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _key_columns() -> list[Column[Any]]:
    """Return the key columns of an artifact, in the order of the primary key. The fingerprint alone
    nearly always identifies an artifact of a namespace, so it comes early.
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
    # These comments are part of the schema. They name eviction_order.py by its old name, value.py.
    Column("density", Double, nullable=False, server_default="0", comment="see value.py"),
    Column(
        "rank",
        Double,
        key="eviction_rank",  # elsewhere in this project, a rank is a process of a job
        nullable=False,
        server_default="0",
        comment="least is evicted first, see value.py",
    ),
    Column("created_at", UtcTime, nullable=False),
    Column("last_used_at", UtcTime, nullable=False, comment="lags by the flush interval"),
    Column("hits", BigInteger, nullable=False, comment="lags by the flush interval"),
    Column("pinned_until", UtcTime, nullable=True, comment="is not evicted until then"),
    Column("withheld_at", UtcTime, nullable=True, comment="is not served since then, see reports"),
    Column(
        "looked_up_until",
        UtcTime,
        nullable=True,
        comment="is not evicted until then, unless an upload needs its room",
    ),
    Index(None, "sha256"),
    Index(None, "eviction_rank"),
    Index(None, "namespace", "eviction_rank"),
    Index(None, "namespace", "created_at"),
    # With fewer columns, PostgreSQL reads the whole namespace if most sizes are equal.
    Index(
        "ix_artifacts_by_size", *("namespace", "size_bytes", "fingerprint", "kind", "device_type")
    ),
    Index(None, "last_used_at"),
    # The toolchain comes first. Without statistics, PostgreSQL could prefer an index of namespace
    # and kind to the primary key, and would read the whole namespace to find one artifact.
    Index(None, "toolchain", "namespace", "kind", "last_used_at"),
    *(
        # For artifacts that no upload can evict. The server sums them when a limit is reached.
        Index(
            None,
            *before,
            name,
            postgresql_where=text(f"{name} IS NOT NULL"),
            sqlite_where=text(f"{name} IS NOT NULL"),
        )
        for name in ("pinned_until", "withheld_at")
        for before in ((), ("namespace",))
    ),
)
"""One row per artifact. Its digest and size change if the namespace's policy lets a PUT replace it,
its key never."""

environments = Table(
    "environments",
    metadata,
    Column("id", String(64), primary_key=True, comment="digest of the parts"),
    Column("parts", Text, nullable=False, comment="JSON"),
    Column("used_at", UtcTime, nullable=False, comment="by the last description"),
)
"""Compile environments: versions, flags, CPU features. Equal environments share a row."""

descriptions = Table(
    "descriptions",
    metadata,
    *_key_columns(),
    Column("label", String(128), nullable=False, comment="what its user calls it"),
    Column("identity", String(64), nullable=False, comment="of the program; empty if unknown"),
    Column("environment", String(64), nullable=False),
    Column("parts", Text, nullable=False, comment="of the program, JSON"),
    Column("described_at", UtcTime, nullable=False),
    ForeignKeyConstraint(
        ["namespace", "fingerprint", "kind", "device_type"],
        [f"artifacts.{name}" for name in ("namespace", "fingerprint", "kind", "device_type")],
        name="fk_descriptions_artifacts",
        ondelete="CASCADE",
    ),
    Index(None, "namespace", "kind", "identity", "described_at"),
    Index(None, "namespace", "kind", "label", "described_at"),
    Index(None, "environment"),
)
"""Inputs of the compilation of each artifact, as its publisher reports them. They explain misses. A
row is deleted with its artifact. Artifacts of early releases have no row."""

deletions = Table(
    "deletions",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("claimed_until", UtcTime, nullable=True, comment="a server is at it until then"),
    Column(
        "unconfirmed",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="an earlier claim ended without an answer of the store",
    ),
)
"""Blobs to delete, unless an artifact refers to them. The transaction that removes an artifact adds
the row. A server deletes the blob and then the row; if it dies, another server continues."""

absences = Table(
    "absences",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("since", UtcTime, nullable=False, comment="of the first look"),
)
"""Blobs of artifacts that a server missed in the store. If a blob is still absent an hour later, a
server drops its artifacts. If it is back, the server deletes the row."""

generations = Table(
    "generations",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("generation", Integer, nullable=False, comment="of the name in the store"),
)
"""Generations of blob names in the store. If the store never confirmed a deletion, it may still
delete that name. The next upload of the blob then uses a new name, with the next generation. Rows
are permanent. A blob without a row has generation 0."""

chores = Table(
    "chores",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("next_at", UtcTime, nullable=False),
)
"""Periodic work that one server does for all: the server that advances `next_at`."""

recorded_times = Table(
    "recorded_times",
    metadata,
    Column("name", String(64), primary_key=True, comment="of a clock"),
    Column("recorded_at", UtcTime, nullable=False),
)
"""The recorded time, which follows the clock at a limited pace (see `services.plausible_clock`),
and when a server last dropped an artifact without its blob (see `services.maintenance.reconciler`).
"""

identifiers = Table(
    "identifiers",
    metadata,
    Column("name", String(64), primary_key=True, comment="of what it identifies"),
    Column("value", String(64), nullable=False, comment="random"),
)
"""Random values by name. `cache` never changes, and identifies the cache of a backup. `policies`
changes with every policy, `recount` with every correction of the usage counters."""

suspensions = Table(
    "suspensions",
    metadata,
    Column("began_at", UtcTime, primary_key=True),
    Column("ended_at", UtcTime, nullable=True, comment="null while it lasts"),
    Column(
        "followed_at", UtcTime, nullable=False, comment="the time that the servers believe so far"
    ),
    Column("seen_at", UtcTime, nullable=False, comment="the last time of the clock"),
    Column("up_seconds", Double, nullable=False, comment="how long that server has run"),
)
"""Periods in which nothing is deleted by age; see `queries.recorded_times.Suspension`. Rows of past
periods stay, because the servers compute ages with them."""

leases = Table(
    "leases",
    metadata,
    *_key_columns(),
    Column("token", String(32), nullable=False, comment="of the last grant"),
    Column("fencing", BigInteger, nullable=False, comment="grows with every grant"),
    Column("holder", String(128), nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("released_at", UtcTime, nullable=True, comment="null while it is held"),
    Column(
        "caller",
        String(128),
        nullable=False,
        server_default="",
        comment="who holds it, as in the audit log",
    ),
    Column(
        "ttl_seconds",
        Double,
        nullable=True,
        comment="of the last grant; null if an earlier release wrote it",
    ),
    Index(None, "expires_at"),
    Index(None, "caller", "expires_at"),
)
"""The last lease of each key. The row outlives the lease, so that `fencing` keeps growing (see
`queries.leases`)."""

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
    Column(
        "writer",
        String(128),
        nullable=False,
        server_default="",
        comment="the only one who used it; empty for several",
    ),
    Index(None, "namespace", "name", "used_at"),
    Index(None, "namespace", "used_at"),
)
"""Entries of manifests. A manifest exists while it has entries."""

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
    *(
        Column(
            f"{name}_bytes",
            BigInteger,
            nullable=False,
            server_default="0",
            comment=f"of the {rows}, as limits count them, see queries.costs",
        )
        for name, rows in (("metadata", "artifacts"), ("manifest", "manifests"))
    ),
)
"""Counters per namespace. Hits, misses, served bytes, conflicts and saved seconds lag by the flush
interval. Each transaction that changes artifacts or manifests changes the other counters. Each
artifact counts in full, although artifacts with equal bytes share a blob."""

history = Table(
    "history",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("step", String(8), primary_key=True, comment="hour or day"),
    Column("at", UtcTime, primary_key=True, comment="beginning of the step"),
    Column("kind", String(32), primary_key=True),
    Column("device_type", String(128), primary_key=True, comment="empty for those beyond a limit"),
    Column("job", String(128), primary_key=True, comment="empty for none, or beyond a limit"),
    Column("hits", BigInteger, nullable=False),
    Column("misses", BigInteger, nullable=False),
    Column("served_bytes", BigInteger, nullable=False),
    Column("puts", BigInteger, nullable=False),
    Column("saved_compile_seconds", Double, nullable=False),
    Index(None, "step", "at"),
)
"""Requests per hour and per day: each request counts in two rows. Counts lag by the flush interval.
Rows are deleted by age."""

runs = Table(
    "runs",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("run", String(64), primary_key=True),
    Column("process", String(64), primary_key=True),
    Column("job", String(128), nullable=False, comment="empty for none"),
    Column("writer", String(128), nullable=False, comment="who reported it"),
    Column("reported_at", UtcTime, nullable=False, comment="by the server's clock"),
    Column("size_bytes", Integer, nullable=False, comment="of the row, about"),
    Column("program", String(128), nullable=False),
    Column("producer", String(128), nullable=False),
    Column("started_at", UtcTime, nullable=False, comment="by the client's clock"),
    Column("seconds", Double, nullable=False),
    Column("saved_wall_seconds", Double, nullable=False),
    Column("counts", Text, nullable=False, comment="JSON"),
    Column("misses", Text, nullable=False, comment="JSON"),
    Column("first_step_seconds", Double, nullable=True, comment="null: not reported"),
    Column("last_program_seconds", Double, nullable=True, comment="null: not reported"),
    Index(None, "namespace", "reported_at", "run", "size_bytes"),
    Index(None, "namespace", "job", "reported_at", "run"),
    Index(None, "writer", "reported_at", "size_bytes"),
    Index(None, "reported_at"),
)
"""One row per client process: its last report. Rows are deleted by age. If a caller or
namespace exceeds its limit, whole runs are deleted."""

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
    Column(
        "issuer", Text, nullable=True, comment="whose JWT it was exchanged for; null for others"
    ),
)
"""API tokens. A secret is 256 random bits, so a fast hash is as safe as a slow one."""

sessions = Table(
    "sessions",
    metadata,
    Column("id_sha256", String(64), primary_key=True, comment="the browser has the id itself"),
    Column("token_id", String(16), nullable=False, comment="whose rights it has"),
    Column("expires_at", UtcTime, nullable=False),
    Index(None, "token_id", "expires_at"),
    Index(None, "expires_at"),
)
"""Sessions of browsers in the dashboard. An id is 256 random bits. A session ends with its token
and does not contain the token's secret."""

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
"""Policies of namespaces. A namespace without a row has the default policy."""

reports = Table(
    "reports",
    metadata,
    *_key_columns(),
    Column("sha256", String(64), nullable=False, comment="the blob that was found wrong"),
    Column("reason", String(32), nullable=False),
    Column("reported_by", String(128), nullable=False),
    Column("reported_at", UtcTime, nullable=False),
)
"""The last report that an artifact is wrong, by a caller with write access. The report withholds
the artifact, or waits for a second reporter. The row is deleted with the artifact, or when an
administrator decides."""

withdrawals = Table(
    "withdrawals",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("mark", String(16), nullable=False, comment="random"),
    Column("fingerprint", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("device_type", String(128), nullable=False),
    Column("sha256", String(64), nullable=False, comment="names the blob"),
    Column("cause", String(16), nullable=False),
    Column("withdrawn_at", UtcTime, nullable=False),
    # For a region, which refuses these bytes while its upstream does not answer.
    Index(
        "ix_withdrawals_withheld",
        *("namespace", "sha256"),
        postgresql_where=text("cause = 'withheld'"),
        sqlite_where=text("cause = 'withheld'"),
    ),
)
"""Artifacts that were withheld, deleted or replaced, numbered per namespace without gaps. By the
random `mark`, a client detects that a restored backup has numbered the entries again. The
transaction of the change adds the row. The oldest rows are deleted by age and number. A row with
the cause `gap` names no artifact, and the list does not continue across it
(`queries.withdrawals`)."""

withdrawal_heads = Table(
    "withdrawal_heads",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False, comment="of the last withdrawal"),
    Column("mark", String(16), nullable=False, comment="of the last withdrawal"),
)
"""The last withdrawal of each namespace. Each transaction that withdraws locks the row until it
commits, so numbers become visible in ascending order."""

upstream_publishes = Table(
    "upstream_publishes",
    metadata,
    *_key_columns(),
    Column("sha256", String(64), nullable=False, comment="names the blob"),
    Column("attempts", Integer, nullable=False, comment="that the upstream has refused"),
    Column("next_at", UtcTime, nullable=False, comment="of the next attempt, or end of a claim"),
    Column("publisher", Text, nullable=False, comment="whose rights the upstream checks, JSON"),
    Index(None, "next_at"),
)
"""Artifacts that a region still has to send to its upstream. The transaction that stores such an
artifact adds the row and pins the artifact."""

upstream_downloads = Table(
    "upstream_downloads",
    metadata,
    *_key_columns(),
    Column("claimed_until", UtcTime, nullable=False, comment="a process downloads until then"),
)
"""Downloads of a region from its upstream that a process has claimed."""

upstream_callers = Table(
    "upstream_callers",
    metadata,
    Column("credential_sha256", String(64), primary_key=True),
    Column("access", Text, nullable=False, comment="as the upstream confirmed it, JSON"),
    Column("confirmed_at", UtcTime, nullable=False),
    Index(None, "confirmed_at"),
)
"""Callers of a region whose credential its upstream has confirmed, for times without upstream."""

upstream_namespaces = Table(
    "upstream_namespaces",
    metadata,
    Column("namespace", String(64), primary_key=True),
    Column("position", String(40), nullable=False, comment="in the upstream's withdrawals"),
    Column(
        "earlier",
        Text,
        nullable=False,
        server_default="",
        comment="some positions before it, newest first, a space between two",
    ),
    Column(
        "used",
        Boolean,
        nullable=False,
        server_default=true(),
        comment="false: the region never had an artifact of it",
    ),
)
"""Namespaces of the upstream, and the last withdrawal that a region has applied to each. An unused
namespace has none to apply: its position is the end of the list at the last probe."""

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
    Column("server_request_id", String(64), nullable=True),
    Column("address", String(128), nullable=True),
    Index(None, "at"),
    Index(None, "namespace", "id"),
)
"""The audit log. The transaction of a change adds its row. Rows are deleted after `audit_days`."""
