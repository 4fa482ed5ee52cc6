"""What a server did by hour and by day, and what runs reported.

Revision: 0009
Follows: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "history",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("step", sa.String(8), nullable=False, comment="hour or day"),
        sa.Column(
            "at", sa.DateTime(timezone=True), nullable=False, comment="beginning of the step"
        ),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column(
            "device_type",
            sa.String(128),
            nullable=False,
            comment="empty for those beyond a limit",
        ),
        sa.Column(
            "job", sa.String(128), nullable=False, comment="empty for none, or beyond a limit"
        ),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("hits", "misses", "served_bytes", "puts")
        ),
        sa.Column("saved_compile_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint(
            "namespace", "step", "at", "kind", "device_type", "job", name="pk_history"
        ),
    )
    op.create_index("ix_history_step_at", "history", ["step", "at"])
    op.create_table(
        "runs",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("process", sa.String(64), nullable=False),
        sa.Column("job", sa.String(128), nullable=False, comment="empty for none"),
        sa.Column("writer", sa.String(128), nullable=False, comment="who reported it"),
        sa.Column(
            "reported_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="by the server's clock",
        ),
        sa.Column("size_bytes", sa.Integer(), nullable=False, comment="of the row, about"),
        sa.Column("program", sa.String(128), nullable=False),
        sa.Column("producer", sa.String(128), nullable=False),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="by the client's clock",
        ),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("saved_wall_seconds", sa.Double(), nullable=False),
        sa.Column("counts", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("misses", sa.Text(), nullable=False, comment="JSON"),
        sa.PrimaryKeyConstraint("namespace", "run", "process", name="pk_runs"),
    )
    for columns in (
        ["namespace", "reported_at", "run", "size_bytes"],
        ["namespace", "job", "reported_at", "run"],
        ["writer", "reported_at", "size_bytes"],
        ["reported_at"],
    ):
        op.create_index("ix_runs_" + "_".join(columns), "runs", columns)


def downgrade() -> None:
    op.drop_table("runs")
    op.drop_table("history")
