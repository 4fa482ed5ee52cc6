"""Tokens that a JWT was exchanged for: whose JWT it was.

Revision: 0006
Follows: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tokens") as batch:
        batch.add_column(
            sa.Column(
                "issuer",
                sa.Text(),
                nullable=True,
                comment="whose JWT it was exchanged for; null for others",
            )
        )


def downgrade() -> None:
    with op.batch_alter_table("tokens") as batch:
        batch.drop_column("issuer")
