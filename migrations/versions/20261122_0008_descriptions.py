"""What artifacts were made of.

Revision: 0008
Follows: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_KEY = ("namespace", "fingerprint", "kind", "device_type")


def upgrade() -> None:
    op.create_table(
        "environments",
        sa.Column("id", sa.String(64), nullable=False, comment="digest of the parts"),
        sa.Column("parts", sa.Text(), nullable=False, comment="JSON"),
        sa.Column(
            "used_at", sa.DateTime(timezone=True), nullable=False, comment="by the last description"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_environments"),
    )
    op.create_table(
        "descriptions",
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("device_type", sa.String(128), nullable=False),
        sa.Column("label", sa.String(128), nullable=False, comment="what its user calls it"),
        sa.Column(
            "identity", sa.String(64), nullable=False, comment="of the program; empty if unknown"
        ),
        sa.Column("environment", sa.String(64), nullable=False),
        sa.Column("parts", sa.Text(), nullable=False, comment="of the program, JSON"),
        sa.Column("described_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            _KEY,
            [f"artifacts.{name}" for name in _KEY],
            name="fk_descriptions_artifacts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(*_KEY, name="pk_descriptions"),
    )
    for columns in (
        ["namespace", "kind", "identity", "described_at"],
        ["namespace", "kind", "label", "described_at"],
        ["environment"],
    ):
        name = "ix_descriptions_" + "_".join(columns)
        op.create_index(name, "descriptions", columns)


def downgrade() -> None:
    op.drop_table("descriptions")
    op.drop_table("environments")
