"""Blobs that a server missed in the store.

Revision: 0023
Follows: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "absences",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False, comment="of the first look"),
        sa.PrimaryKeyConstraint("sha256", name="pk_absences"),
    )


def downgrade() -> None:
    op.drop_table("absences")
