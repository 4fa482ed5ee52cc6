"""An index of withheld bytes, for regions.

Revision: 0020
Follows: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_WITHHELD = sa.text("cause = 'withheld'")


def upgrade() -> None:
    op.create_index(
        "ix_withdrawals_withheld",
        "withdrawals",
        ["namespace", "sha256"],
        postgresql_where=_WITHHELD,
        sqlite_where=_WITHHELD,
    )


def downgrade() -> None:
    op.drop_index("ix_withdrawals_withheld", table_name="withdrawals")
