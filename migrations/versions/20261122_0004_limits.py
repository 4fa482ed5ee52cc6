"""For limits on everything that is stored: what rows count, pins of look-ups, holders of leases.

Revision: 0004
Follows: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_PINNED = sa.text("pinned_until IS NOT NULL")
_WITHHELD = sa.text("withheld_at IS NOT NULL")


def upgrade() -> None:
    with op.batch_alter_table("artifacts") as batch:
        batch.add_column(
            sa.Column(
                "looked_up_until",
                sa.DateTime(timezone=True),
                nullable=True,
                comment="is not evicted until then, unless an upload needs its room",
            )
        )
    op.create_index(
        "ix_artifacts_pinned_until",
        "artifacts",
        ["pinned_until"],
        postgresql_where=_PINNED,
        sqlite_where=_PINNED,
    )
    op.create_index(
        "ix_artifacts_withheld_at",
        "artifacts",
        ["withheld_at"],
        postgresql_where=_WITHHELD,
        sqlite_where=_WITHHELD,
    )
    with op.batch_alter_table("usage") as batch:
        for name, comment in _NEW:
            batch.add_column(
                sa.Column(
                    name, sa.BigInteger(), nullable=False, server_default="0", comment=comment
                )
            )
    op.execute(_COUNT)
    with op.batch_alter_table("leases") as batch:
        batch.add_column(
            sa.Column(
                "caller",
                sa.String(length=128),
                nullable=False,
                server_default="",
                comment="who holds it, as in the audit log",
            )
        )
    op.create_index("ix_leases_caller_expires_at", "leases", ["caller", "expires_at"])
    op.create_index(
        "ix_manifest_entries_namespace_used_at", "manifest_entries", ["namespace", "used_at"]
    )


def downgrade() -> None:
    op.drop_index("ix_manifest_entries_namespace_used_at", "manifest_entries")
    op.drop_index("ix_leases_caller_expires_at", "leases")
    with op.batch_alter_table("leases") as batch:
        batch.drop_column("caller")
    with op.batch_alter_table("usage") as batch:
        for name, _ in reversed(_NEW):
            batch.drop_column(name)
    op.drop_index("ix_artifacts_withheld_at", "artifacts")
    op.drop_index("ix_artifacts_pinned_until", "artifacts")
    with op.batch_alter_table("artifacts") as batch:
        batch.drop_column("looked_up_until")


_NEW = (
    ("metadata_bytes", "of the artifacts, as limits count them, see queries.costs"),
    ("manifest_bytes", "of the manifests, as limits count them, see queries.costs"),
)

_COUNT = """
UPDATE usage SET
    metadata_bytes = (
        SELECT coalesce(sum(
            CASE WHEN size_bytes + length(metadata_header) < 4096 THEN 4096 - size_bytes
            ELSE length(metadata_header) END
        ), 0)
        FROM artifacts WHERE artifacts.namespace = usage.namespace
    ),
    manifest_bytes = (
        SELECT 512 * count(*) FROM manifest_entries
        WHERE manifest_entries.namespace = usage.namespace
    )
"""
