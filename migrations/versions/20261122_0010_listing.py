"""The artifacts of a namespace, newest first.

A million artifacts take PostgreSQL seconds to index, during which servers of the release before go
on storing: the index is built CONCURRENTLY, which no transaction can hold. So the revision begins
again where it was interrupted, and what an interrupted build left behind, which is not valid, goes
first.

Revision: 0010
Follows: 0009
"""

import logging

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_INDEX = "ix_artifacts_namespace_created_at"

_IS_LEFT_BEHIND = """
SELECT 1 FROM pg_index
WHERE indexrelid = to_regclass('ix_artifacts_namespace_created_at') AND NOT indisvalid
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.create_index(_INDEX, "artifacts", ["namespace", "created_at"])
        return
    with op.get_context().autocommit_block():
        if op.get_bind().exec_driver_sql(_IS_LEFT_BEHIND).first() is not None:
            # Its last step takes a lock behind which reads of the table queue.
            op.execute("SET lock_timeout = '60s'")
            op.execute(f"DROP INDEX CONCURRENTLY {_INDEX}")
        # A build waits for every transaction that began before it, and keeps no upload waiting: a
        # dump of an hour must not end the start.
        op.execute("SET lock_timeout = '6h'")
        logging.getLogger("migrations").info(
            "building the index %s: this waits for transactions that began before it, such as "
            "those of pg_dump; uploads go on",
            _INDEX,
        )
        op.create_index(
            _INDEX,
            "artifacts",
            ["namespace", "created_at"],
            postgresql_concurrently=True,
            if_not_exists=True,
        )
        op.execute("SET lock_timeout = '60s'")


def downgrade() -> None:
    op.drop_index(_INDEX, table_name="artifacts")
