"""The database: tables, connections, migration, and every SQL statement."""

__all__: list[str] = []
