"""For trust: tokens, policies of namespaces, reports of wrong artifacts, the audit log.

Revision: 0003
Follows: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    with op.batch_alter_table("artifacts") as batch:
        batch.add_column(
            sa.Column(
                "withheld_at",
                _TIME,
                nullable=True,
                comment="is not served since then, see reports",
            )
        )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=16), nullable=False, comment="in the token, not a secret"),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("description", sa.String(length=200), nullable=False),
        sa.Column(
            "grants", sa.Text(), nullable=False, comment="<scope>:<pattern>, a space between two"
        ),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("expires_at", _TIME, nullable=True),
        sa.Column("last_used_at", _TIME, nullable=True, comment="lags by the flush interval"),
        sa.Column("revoked_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
    )
    op.create_table(
        "namespaces",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("trusted", sa.Boolean(), nullable=False),
        sa.Column("anonymous_read", sa.Boolean(), nullable=False),
        sa.Column("limit_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_artifact_bytes", sa.BigInteger(), nullable=True),
        sa.Column("requests_per_second", sa.Double(), nullable=True),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("namespace", name="pk_namespaces"),
    )
    op.create_table(
        "reports",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("device_type", sa.String(length=128), nullable=False),
        sa.Column(
            "sha256", sa.String(length=64), nullable=False, comment="the blob that was found wrong"
        ),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("reported_by", sa.String(length=128), nullable=False),
        sa.Column("reported_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint(
            "namespace", "fingerprint", "kind", "device_type", name="pk_reports"
        ),
    )
    op.create_table(
        "audit",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("namespace", sa.String(length=64), nullable=True),
        sa.Column("subject", sa.String(length=300), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_namespace_id", "audit", ["namespace", "id"])


def downgrade() -> None:
    op.drop_index("ix_audit_namespace_id", "audit")
    op.drop_index("ix_audit_at", "audit")
    for name in ("audit", "reports", "namespaces", "tokens"):
        op.drop_table(name)
    with op.batch_alter_table("artifacts") as batch:
        batch.drop_column("withheld_at")
