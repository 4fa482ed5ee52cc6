"""What a limit cannot evict and what an administrator decides about, by namespace; toolchains.

On PostgreSQL, the indexes are built CONCURRENTLY, as in 0010, so servers of the release before go
on reading and storing. An interrupted revision begins again, and drops an index that is not valid.

Revision: 0017
Follows: 0016
"""

import logging

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_artifacts_namespace_pinned_until", ["namespace", "pinned_until"], "pinned_until"),
    ("ix_artifacts_namespace_withheld_at", ["namespace", "withheld_at"], "withheld_at"),
    (
        "ix_artifacts_toolchain_namespace_kind_last_used_at",
        ["toolchain", "namespace", "kind", "last_used_at"],
        None,
    ),
)

_IS_LEFT_BEHIND = "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass('{}') AND NOT indisvalid"


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for name, columns, present in _INDEXES:
            op.create_index(name, "artifacts", columns, sqlite_where=_where(present))
        return
    with op.get_context().autocommit_block():
        for name, columns, present in _INDEXES:
            if op.get_bind().exec_driver_sql(_IS_LEFT_BEHIND.format(name)).first() is not None:
                # Its last step takes a lock behind which reads of the table queue.
                op.execute("SET lock_timeout = '60s'")
                op.execute(f"DROP INDEX CONCURRENTLY {name}")
            # A build waits for every transaction that began before it, and keeps no upload waiting:
            # a dump of an hour must not end the start.
            op.execute("SET lock_timeout = '6h'")
            logging.getLogger("migrations").info(
                "building the index %s: this waits for transactions that began before it, such as "
                "those of pg_dump; uploads go on",
                name,
            )
            op.create_index(
                name,
                "artifacts",
                columns,
                postgresql_where=_where(present),
                postgresql_concurrently=True,
                if_not_exists=True,
            )
        op.execute("SET lock_timeout = '60s'")


def downgrade() -> None:
    for name, _, _ in reversed(_INDEXES):
        op.drop_index(name, table_name="artifacts")


def _where(present: str | None) -> sa.TextClause | None:
    return None if present is None else sa.text(f"{present} IS NOT NULL")
