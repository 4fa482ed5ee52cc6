"""Earlier positions of a region in the upstream's lists of withdrawals.

Revision: 0021
Follows: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "upstream_namespaces",
        sa.Column(
            "earlier",
            sa.Text(),
            nullable=False,
            server_default="",
            comment="some positions before it, newest first, a space between two",
        ),
    )


def downgrade() -> None:
    with op.batch_alter_table("upstream_namespaces") as table:
        table.drop_column("earlier")
