"""Regions: what a server with an upstream has queued, claimed, confirmed and applied.

Revision: 0019
Follows: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    publishes = (
        sa.Column("sha256", sa.String(64), nullable=False, comment="names the blob"),
        sa.Column(
            "attempts", sa.Integer(), nullable=False, comment="that the upstream has refused"
        ),
        sa.Column(
            "next_at", time, nullable=False, comment="of the next attempt, or end of a claim"
        ),
        sa.Column(
            "publisher", sa.Text(), nullable=False, comment="whose rights the upstream checks, JSON"
        ),
    )
    claim = sa.Column(
        "claimed_until", time, nullable=False, comment="a process downloads until then"
    )
    for table, columns in (("upstream_publishes", publishes), ("upstream_downloads", (claim,))):
        op.create_table(
            table,
            sa.Column("namespace", sa.String(64), nullable=False),
            sa.Column("fingerprint", sa.String(64), nullable=False),
            sa.Column("kind", sa.String(32), nullable=False),
            sa.Column("device_type", sa.String(128), nullable=False),
            *columns,
            sa.PrimaryKeyConstraint(
                *("namespace", "fingerprint", "kind", "device_type"), name=f"pk_{table}"
            ),
        )
    op.create_index("ix_upstream_publishes_next_at", "upstream_publishes", ["next_at"])
    op.create_table(
        "upstream_callers",
        sa.Column("credential_sha256", sa.String(64), nullable=False),
        sa.Column(
            "access", sa.Text(), nullable=False, comment="as the upstream confirmed it, JSON"
        ),
        sa.Column("confirmed_at", time, nullable=False),
        sa.PrimaryKeyConstraint("credential_sha256", name="pk_upstream_callers"),
    )
    op.create_index("ix_upstream_callers_confirmed_at", "upstream_callers", ["confirmed_at"])
    op.create_table(
        "upstream_namespaces",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column(
            "position", sa.String(40), nullable=False, comment="in the upstream's withdrawals"
        ),
        sa.PrimaryKeyConstraint("namespace", name="pk_upstream_namespaces"),
    )


def downgrade() -> None:
    for name in ("namespaces", "callers", "downloads", "publishes"):
        op.drop_table(f"upstream_{name}")
