"""For bounds: who wrote an entry of a manifest; where a change came from.

Revision: 0005
Follows: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("manifest_entries") as batch:
        batch.add_column(
            sa.Column(
                "writer",
                sa.String(length=128),
                nullable=False,
                server_default="",
                comment="the only one who used it; empty for several",
            )
        )
    with op.batch_alter_table("audit") as batch:
        batch.add_column(sa.Column("server_request_id", sa.String(length=64), nullable=True))
        batch.add_column(sa.Column("address", sa.String(length=128), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("audit") as batch:
        batch.drop_column("address")
        batch.drop_column("server_request_id")
    with op.batch_alter_table("manifest_entries") as batch:
        batch.drop_column("writer")
