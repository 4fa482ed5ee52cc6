"""Withdrawals: what hosts must not use any more.

Revision: 0012
Follows: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "withdrawals",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("mark", sa.String(16), nullable=False, comment="random"),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("device_type", sa.String(128), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False, comment="names the blob"),
        sa.Column("cause", sa.String(16), nullable=False),
        sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "number", name="pk_withdrawals"),
    )
    op.create_table(
        "withdrawal_heads",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False, comment="of the last withdrawal"),
        sa.Column("mark", sa.String(16), nullable=False, comment="of the last withdrawal"),
        sa.PrimaryKeyConstraint("namespace", name="pk_withdrawal_heads"),
    )


def downgrade() -> None:
    op.drop_table("withdrawal_heads")
    op.drop_table("withdrawals")
