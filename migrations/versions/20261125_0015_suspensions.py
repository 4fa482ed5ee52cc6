"""The times during which nothing was deleted by age.

Revision: 0015
Follows: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "suspensions",
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "ended_at", sa.DateTime(timezone=True), nullable=True, comment="null while it lasts"
        ),
        sa.Column(
            "followed_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="the time that the servers believe so far",
        ),
        sa.Column(
            "seen_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="the last time of the clock",
        ),
        sa.Column(
            "up_seconds", sa.Double(), nullable=False, comment="how long that server has run"
        ),
        sa.PrimaryKeyConstraint("began_at", name="pk_suspensions"),
    )


def downgrade() -> None:
    op.drop_table("suspensions")
