"""Insert-or-update, which SQL has under one name in every dialect and SQLAlchemy has not."""

from typing import TypeAlias

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["Upsert", "insert_into"]

Upsert: TypeAlias = sqlite.Insert | postgresql.Insert


def insert_into(connection: AsyncConnection, table: Table) -> Upsert:
    """An INSERT that knows ON CONFLICT, in the dialect of the connection."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
