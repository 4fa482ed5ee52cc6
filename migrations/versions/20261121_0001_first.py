"""The first tables: artifacts, leases, manifests and usage.

Revision: 0001
Follows: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("device_type", sa.String(length=128), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False, comment="names the blob"),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "metadata_header",
            sa.Text(),
            nullable=False,
            comment="as uploaded; empty when there is none",
        ),
        sa.Column("compile_seconds", sa.Double(), nullable=False, comment="what a hit saves"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "last_used_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="lags by the flush interval",
        ),
        sa.Column("hits", sa.BigInteger(), nullable=False, comment="lags by the flush interval"),
        sa.Column(
            "pinned_until",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="a lookup promised it until then",
        ),
        sa.PrimaryKeyConstraint(
            "namespace", "fingerprint", "kind", "device_type", name="pk_artifacts"
        ),
    )
    op.create_index("ix_artifacts_sha256", "artifacts", ["sha256"])

    op.create_table(
        "leases",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("device_type", sa.String(length=128), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False, comment="of the last grant"),
        sa.Column("fencing", sa.BigInteger(), nullable=False, comment="grows with every grant"),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "released_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="null while it is held",
        ),
        sa.PrimaryKeyConstraint(
            "namespace", "fingerprint", "kind", "device_type", name="pk_leases"
        ),
    )
    op.create_index("ix_leases_expires_at", "leases", ["expires_at"])

    op.create_table(
        "manifest_entries",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("device_type", sa.String(length=128), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(
            "namespace", "name", "fingerprint", "kind", "device_type", name="pk_manifest_entries"
        ),
    )
    op.create_index(
        "ix_manifest_entries_namespace_name_used_at",
        "manifest_entries",
        ["namespace", "name", "used_at"],
    )

    op.create_table(
        "usage",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("artifacts", sa.BigInteger(), nullable=False, comment="stored now"),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, comment="stored now"),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("misses", sa.BigInteger(), nullable=False),
        sa.Column("served_bytes", sa.BigInteger(), nullable=False),
        sa.Column("puts", sa.BigInteger(), nullable=False),
        sa.Column("conflicts", sa.BigInteger(), nullable=False),
        sa.Column("saved_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", name="pk_usage"),
    )


def downgrade() -> None:
    op.drop_table("usage")
    op.drop_index("ix_manifest_entries_namespace_name_used_at", table_name="manifest_entries")
    op.drop_table("manifest_entries")
    op.drop_index("ix_leases_expires_at", table_name="leases")
    op.drop_table("leases")
    op.drop_index("ix_artifacts_sha256", table_name="artifacts")
    op.drop_table("artifacts")
