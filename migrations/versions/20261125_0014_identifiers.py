"""Identifiers that are created once, such as the cache's own in its backups.

Revision: 0014
Follows: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "identifiers",
        sa.Column("name", sa.String(64), nullable=False, comment="of what it identifies"),
        sa.Column("value", sa.String(64), nullable=False, comment="random"),
        sa.PrimaryKeyConstraint("name", name="pk_identifiers"),
    )


def downgrade() -> None:
    op.drop_table("identifiers")
