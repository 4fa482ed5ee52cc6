"""The database: tables, connections, migration and SQL statements."""

__all__: list[str] = []
