"""The artifacts of a namespace, largest first.

On PostgreSQL the index is built CONCURRENTLY, as in revision 0010, which explains the steps.

Revision: 0016
Follows: 0015
"""

import logging

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_INDEX = "ix_artifacts_by_size"
_COLUMNS = ["namespace", "size_bytes", "fingerprint", "kind", "device_type"]

_IS_LEFT_BEHIND = """
SELECT 1 FROM pg_index WHERE indexrelid = to_regclass('ix_artifacts_by_size') AND NOT indisvalid
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.create_index(_INDEX, "artifacts", _COLUMNS)
        return
    with op.get_context().autocommit_block():
        if op.get_bind().exec_driver_sql(_IS_LEFT_BEHIND).first() is not None:
            op.execute("SET lock_timeout = '60s'")
            op.execute(f"DROP INDEX CONCURRENTLY {_INDEX}")
        op.execute("SET lock_timeout = '6h'")
        logging.getLogger("migrations").info(
            "building the index %s: this waits for transactions that began before it, such as "
            "those of pg_dump; uploads go on",
            _INDEX,
        )
        op.create_index(
            _INDEX, "artifacts", _COLUMNS, postgresql_concurrently=True, if_not_exists=True
        )
        op.execute("SET lock_timeout = '60s'")


def downgrade() -> None:
    op.drop_index(_INDEX, table_name="artifacts")
