"""The time that the servers have recorded, and how long leases live.

Revision: 0013
Follows: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recorded_times",
        sa.Column("name", sa.String(64), nullable=False, comment="of a clock"),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_recorded_times"),
    )
    op.add_column(
        "leases",
        sa.Column(
            "ttl_seconds",
            sa.Double(),
            nullable=True,
            comment="of the last grant; null if an earlier release wrote it",
        ),
    )


def downgrade() -> None:
    op.drop_column("leases", "ttl_seconds")
    op.drop_table("recorded_times")
