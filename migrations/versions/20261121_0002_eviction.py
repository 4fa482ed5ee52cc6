"""Add what eviction needs: artifacts' ranks, blobs that are being deleted, and periodic chores.

Revision: 0002
Follows: 0001
"""

import base64
import json
import math
from datetime import UTC

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_PAGE = 1000


def upgrade() -> None:
    with op.batch_alter_table("artifacts") as batch:
        for name, kind, comment in _NEW:
            empty = "" if isinstance(kind, sa.String) else "0"
            batch.add_column(
                sa.Column(name, kind, nullable=False, server_default=empty, comment=comment)
            )
        batch.alter_column(
            "pinned_until",
            existing_type=sa.DateTime(timezone=True),
            comment="is not evicted until then",
            existing_comment="a lookup promised it until then",
        )
    with op.batch_alter_table("usage") as batch:
        for name in ("evictions", "evicted_bytes"):
            batch.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    _rank_artifacts()
    # The defaults stay: a server of the previous release inserts without these columns.
    op.create_index("ix_artifacts_rank", "artifacts", ["rank"])
    op.create_index("ix_artifacts_namespace_rank", "artifacts", ["namespace", "rank"])
    op.create_index("ix_artifacts_last_used_at", "artifacts", ["last_used_at"])

    op.create_table(
        "deletions",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "claimed_until",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="a server is at it until then",
        ),
        sa.PrimaryKeyConstraint("sha256", name="pk_deletions"),
    )
    op.create_table(
        "chores",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_chores"),
    )


def downgrade() -> None:
    op.drop_table("chores")
    op.drop_table("deletions")
    op.drop_index("ix_artifacts_last_used_at", "artifacts")
    op.drop_index("ix_artifacts_namespace_rank", "artifacts")
    op.drop_index("ix_artifacts_rank", "artifacts")
    with op.batch_alter_table("usage") as batch:
        batch.drop_column("evicted_bytes")
        batch.drop_column("evictions")
    with op.batch_alter_table("artifacts") as batch:
        batch.alter_column(
            "pinned_until",
            existing_type=sa.DateTime(timezone=True),
            comment="a lookup promised it until then",
            existing_comment="is not evicted until then",
        )
        for name, _, _ in reversed(_NEW):
            batch.drop_column(name)


_NEW = (
    ("toolchain", sa.String(length=256), "as the metadata says"),
    ("density", sa.Double(), "see value.py"),
    ("rank", sa.Double(), "least is evicted first, see value.py"),
)


def _rank_artifacts() -> None:
    """Fill the new columns with the server's values, a page at a time in key order."""
    key = ("namespace", "fingerprint", "kind", "device_type")
    table = sa.table(
        "artifacts",
        *(sa.column(name, sa.String) for name in key),
        sa.column("metadata_header", sa.Text),
        sa.column("compile_seconds", sa.Double),
        sa.column("size_bytes", sa.BigInteger),
        sa.column("last_used_at", sa.DateTime(timezone=True)),
        *(sa.column(name, kind) for name, kind, _ in _NEW),
    )
    columns = [table.c[name] for name in key]
    fill = (
        sa.update(table)
        .where(*(column == sa.bindparam(f"key_{column.name}") for column in columns))
        .values({name: sa.bindparam(f"new_{name}") for name, _, _ in _NEW})
    )
    connection = op.get_bind()
    last: tuple[str, ...] = ("", "", "", "")
    while True:
        rows = connection.execute(
            sa.select(table)
            .where(sa.tuple_(*columns) > sa.tuple_(*map(sa.literal, last)))
            .order_by(*columns)
            .limit(_PAGE)
        ).all()
        if not rows:
            return
        connection.execute(
            fill,
            [
                {
                    **{f"key_{name}": getattr(row, name) for name in key},
                    "new_toolchain": _toolchain(row.metadata_header),
                    "new_density": _density(row),
                    "new_rank": _density(row) + _seconds(row.last_used_at) / (7 * 24 * 3600),
                }
                for row in rows
            ],
        )
        last = tuple(getattr(rows[-1], name) for name in key)


def _density(row) -> float:
    return math.log2(max(row.compile_seconds, 1e-3) / max(row.size_bytes, 4096))


def _seconds(moment) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _toolchain(header: str) -> str:
    """Return the toolchain. Uploads had valid headers, so an unreadable one gives no error."""
    try:
        raw = base64.urlsafe_b64decode(header + "=" * (-len(header) % 4))
        return str(json.loads(raw).get("toolchain", ""))[:256]
    except (ValueError, AttributeError):
        return ""
