"""When the processes of a run were ready.

Revision: 0018
Follows: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_COLUMNS = ("first_step_seconds", "last_program_seconds")


def upgrade() -> None:
    for name in _COLUMNS:
        column = sa.Column(name, sa.Double(), nullable=True, comment="null: not reported")
        op.add_column("runs", column)


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("runs", name)
