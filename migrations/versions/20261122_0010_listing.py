"""The artifacts of a namespace, newest first.

Revision: 0010
Follows: 0009
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_artifacts_namespace_created_at", "artifacts", ["namespace", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_artifacts_namespace_created_at", table_name="artifacts")
