"""Positions of a region in the lists of namespaces that it does not use.

Revision: 0022
Follows: 0021
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "upstream_namespaces",
        sa.Column(
            "used",
            sa.Boolean(),
            nullable=False,
            server_default=sa.true(),
            comment="false: the region never had an artifact of it",
        ),
    )


def downgrade() -> None:
    op.execute("DELETE FROM upstream_namespaces WHERE NOT used")
    with op.batch_alter_table("upstream_namespaces") as table:
        table.drop_column("used")
