"""Names of blobs whose deletion was never confirmed.

Revision: 0007
Follows: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "generations",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False, comment="of the name in the store"),
        sa.PrimaryKeyConstraint("sha256", name="pk_generations"),
    )
    with op.batch_alter_table("deletions") as batch:
        batch.add_column(
            sa.Column(
                "unconfirmed",
                sa.Boolean(),
                nullable=False,
                server_default=sa.false(),
                comment="an earlier claim ended without an answer of the store",
            )
        )


def downgrade() -> None:
    with op.batch_alter_table("deletions") as batch:
        batch.drop_column("unconfirmed")
    op.drop_table("generations")
