"""The artifacts of a namespace, newest first.

A million artifacts take PostgreSQL seconds to index, during which servers of the release before go
on storing: the index is built CONCURRENTLY, which no transaction can hold. So the revision begins
again where it was interrupted, and what an interrupted build left behind, which is not valid, goes
first.

Revision: 0010
Follows: 0009
"""

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
        # A build waits for the transactions before it, while others may begin; a lock that it does
        # not get in time is no reason to keep others waiting.
        op.execute("SET lock_timeout = '60s'")
        if op.get_bind().exec_driver_sql(_IS_LEFT_BEHIND).first() is not None:
            op.execute(f"DROP INDEX CONCURRENTLY {_INDEX}")
        op.create_index(
            _INDEX,
            "artifacts",
            ["namespace", "created_at"],
            postgresql_concurrently=True,
            if_not_exists=True,
        )
        op.execute("RESET lock_timeout")


def downgrade() -> None:
    op.drop_index(_INDEX, table_name="artifacts")
