"""Sessions of the dashboard.

Revision: 0011
Follows: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column(
            "id_sha256", sa.String(64), nullable=False, comment="the browser has the id itself"
        ),
        sa.Column("token_id", sa.String(16), nullable=False, comment="whose rights it has"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id_sha256", name="pk_sessions"),
    )
    op.create_index("ix_sessions_token_id_expires_at", "sessions", ["token_id", "expires_at"])
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])


def downgrade() -> None:
    op.drop_table("sessions")
